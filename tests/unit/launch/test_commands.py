"""The commands of a run, without starting any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import env
from paceline.errors import LaunchError
from paceline.launch import WorkerCommand, worker_commands
from paceline.spec import Plan


def commands(world_size: int, *program: str, run_dir: Path = Path("/runs/1")) -> list[WorkerCommand]:
    return worker_commands(
        Plan(world_size=world_size, threads_per_worker=2),
        program,
        run_dir=run_dir,
        rendezvous_dir=Path("/tmp/meeting"),
        launched_at=12.5,
    )


def test_every_rank_runs_the_program_behind_the_shim() -> None:
    found = commands(3, "train.py", "--flag")
    assert [command.rank for command in found] == [0, 1, 2]
    assert {command.argv for command in found} == {
        (sys.executable, "-m", "paceline.launch.worker", "train.py", "--flag")
    }


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_worker_reads_back_who_it_is(world_size: int) -> None:
    for rank, command in enumerate(commands(world_size, "-m", "a.module")):
        assert env.worker_facts(command.environ) == env.WorkerFacts(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            init_method="file:///tmp/meeting/store",
            started_by="paceline",
        )
        assert command.environ["OMP_NUM_THREADS"] == "2"
        assert float(command.environ["PACELINE_LAUNCHED_AT"]) == 12.5


def test_a_relative_run_folder_survives_a_change_of_directory() -> None:
    (command,) = commands(1, "train.py", run_dir=Path("runs/1"))
    assert Path(command.environ["PACELINE_RUN_DIR"]) == Path.cwd() / "runs" / "1"


@pytest.mark.parametrize("program", [(), ("-m",)])
def test_nothing_to_run_is_refused(program: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match="nothing to launch"):
        commands(1, *program)


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
