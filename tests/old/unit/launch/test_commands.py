"""The commands of a run, without starting any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.commands import Rendezvous, WorkerCommand, rendezvous_on_one_node, worker_commands
from paceline.launch.team import LaunchOptions
from paceline.spec import NodePlacement, Plan


def commands(world_size: int, *program: str, run_dir: Path = Path("/runs/1")) -> list[WorkerCommand]:
    return worker_commands(
        Plan(world_size=world_size, threads_per_worker=2),
        program,
        LaunchOptions(run_dir),
        rendezvous_on_one_node(Path("/tmp/rendezvous")),
        launched_at=12.5,
    )


def test_every_rank_runs_the_program_behind_the_shim() -> None:
    found = commands(3, "train.py", "--flag")
    assert [command.rank for command in found] == [0, 1, 2]
    assert {command.program for command in found} == {("train.py", "--flag")}


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_worker_reads_back_who_it_is(world_size: int) -> None:
    for rank, command in enumerate(commands(world_size, "-m", "a.module")):
        assert env.worker_facts(command.variables) == env.WorkerFacts(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            init_method="file:///tmp/rendezvous/store",
            started_by="paceline",
        )
        assert command.variables["OMP_NUM_THREADS"] == "2"
        assert float(command.variables["PACELINE_LAUNCHED_AT"]) == 12.5


def test_a_relative_run_folder_survives_a_change_of_directory() -> None:
    (command,) = commands(1, "train.py", run_dir=Path("runs/1"))
    assert Path(command.variables["PACELINE_RUN_DIR"]) == Path.cwd() / "runs" / "1"


def test_the_ranks_of_a_node_stand_together_and_know_their_devices() -> None:
    shares = (NodePlacement("a", 2, devices=(3, 0), cpus=((0, 1), (2, 3))), NodePlacement("b", 1, devices=(5,)))
    plan = Plan(world_size=3, nodes=shares, debug_comm=True)
    rendezvous = Rendezvous("tcp://10.0.0.1:4321", ("eth0", "ib0"))
    found = worker_commands(plan, ["t.py"], LaunchOptions(Path("/runs/1")), rendezvous, launched_at=0.0)
    assert [(command.node, command.rank) for command in found] == [(0, 0), (0, 1), (1, 2)]
    assert [command.variables["LOCAL_RANK"] for command in found] == ["0", "1", "0"]
    assert [command.variables["LOCAL_WORLD_SIZE"] for command in found] == ["2", "2", "1"]
    assert [command.variables["CUDA_VISIBLE_DEVICES"] for command in found] == ["3,0", "3,0", "5"]
    assert {command.variables["CUDA_DEVICE_ORDER"] for command in found} == {"PCI_BUS_ID"}
    assert [command.variables["GLOO_SOCKET_IFNAME"] for command in found] == ["eth0", "eth0", "ib0"]
    assert [command.variables.get("PACELINE_CPUS") for command in found] == ["0,1", "2,3", None]
    assert found[0].variables["NCCL_DEBUG"] == "INFO" and "GRAPH" in found[0].variables["NCCL_DEBUG_SUBSYS"]


def test_more_workers_than_devices_of_a_node_are_refused() -> None:
    plan = Plan(world_size=2, nodes=(NodePlacement("a", 2, devices=(0,)),))
    with pytest.raises(LaunchError, match="2 workers cannot share 1 GPUs of a"):
        worker_commands(plan, ["t.py"], LaunchOptions(Path("/r")), Rendezvous("tcp://a:1", ("eth0",)), launched_at=0.0)


def test_one_node_talks_over_loopback_alone() -> None:
    (command,) = commands(1, "train.py")
    assert {command.variables[name] for name in env.INTERFACE_VARIABLES} == {"lo"}


def test_neither_the_launcher_nor_the_shim_loads_torch() -> None:
    loaded = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys, paceline.launch, paceline.launch.worker; print('torch' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert loaded.stdout == "False\n"
