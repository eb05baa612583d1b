"""`paceline train` on two nodes by each launcher: it reaches the weights of one process and leaves nobody behind, and
the user nobody of these nodes, who knows all about the run, can neither stop nor change it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.spec import Plan, RunRecord
from paceline.spec.plan import RunLimit
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import write_run
from tests.kit.nodes.cluster import INTERFACE, Cluster, Node, NodeProcess
from tests.kit.nodes.mpirun import mpirun_argv, why_not_mpirun
from tests.kit.nodes.ray_cluster import RAY_VARIABLES, ray_on, why_not_ray
from tests.kit.nodes.slurm import slurm_on, why_not_slurm
from tests.kit.nodes.sshd import ssh_between, why_not_ssh
from tests.kit.nodes.stdio import commands_on, wait_until
from tests.old.ranks.attacking import PATIENCE_S, ROOT, attack_command, attacked_folder, check_attacks

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(1500)]

TIMEOUT_S = 600.0
PROGRAM = "-m paceline"
"""What stands in the command of every process of a run."""
MAX_STEPS = 100
"""The attack on workers that train begins with the first checkpoint."""
SETTINGS = ("parity=bitwise", "virtual_shards=4", "epochs=10", "checkpoint.every_steps=10")
VARIABLES = {"PACELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Launcher:
    """How a run of two nodes is started."""

    why_not: Callable[[], str | None]
    services: Callable[[Sequence[Node], Path], AbstractContextManager[None]]
    """What has to run on the nodes."""
    command: Callable[[Path], Sequence[str]]
    """On the first node, for a run folder."""
    num_workers: int


def _train(run_dir: Path, *words: str) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    job = ["digits-lenet", *settings, "--max-steps", str(MAX_STEPS), "--threads", "1", "--quiet"]
    return [sys.executable, "-m", "paceline", "train", *job, "--out", str(run_dir), *words]


def command_alone(run_dir: Path) -> list[str]:
    return _train(run_dir, "-n", "1")


def _mpirun(run_dir: Path) -> list[str]:
    plan = Plan(world_size=3, threads_per_worker=1, algorithm="tree_exact")
    program = write_run(resolve_job("digits-lenet", SETTINGS), plan, run_dir, RunLimit(MAX_STEPS), quiet=True)
    variables = [*VARIABLES, "MASTER_ADDR=node0", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
    return mpirun_argv("node0:2,node1:1", variables, program)


LAUNCHERS = {
    "mpirun": Launcher(why_not_mpirun, ssh_between, _mpirun, num_workers=3),
    "ssh": Launcher(
        why_not_ssh, ssh_between, lambda run_dir: _train(run_dir, "--hosts", "node0:2,node1:1"), num_workers=3
    ),
    "slurm": Launcher(
        why_not_slurm,
        lambda nodes, folder: slurm_on(nodes, folder, cpus_per_node=1),
        lambda run_dir: [
            *("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"),
            *_train(run_dir, "--launcher", "slurm"),
        ],
        num_workers=2,
    ),
    "ray": Launcher(
        why_not_ray,
        lambda nodes, _folder: ray_on(nodes),
        lambda run_dir: [
            *("env", *(f"{name}={value}" for name, value in RAY_VARIABLES.items())),
            *_train(run_dir, "--launcher", "ray", "-n", "3"),
        ],
        num_workers=3,
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_job_of_two_nodes_under_attack(cluster: Cluster, weights_alone: str, tmp_path: Path, name: str) -> None:
    launcher = LAUNCHERS[name]
    if reason := launcher.why_not():
        pytest.skip(reason)
    with attacked_folder() as folder, launcher.services(cluster.nodes, tmp_path):
        run_dir = folder / "run"
        training = cluster.nodes[0].exec(launcher.command(run_dir), env=VARIABLES)
        with _attacks(cluster.nodes, run_dir) as attacks:
            assert training.wait(TIMEOUT_S) == 0, training.output
            for attack in attacks:
                assert attack.wait(PATIENCE_S) == 0, attack.output
        check_attacks([attack.stdout for attack in attacks], run_dir)
        record = RunRecord.load(run_dir / "record.json")
        assert record.weights_sha256 == weights_alone
        assert record.plan.world_size == launcher.num_workers
        _check_nobody_is_left(cluster.nodes)
        if name in ("ssh", "slurm"):  # mpirun has no plan of nodes; Ray fills one node where it has enough processors
            assert [share.hostname for share in record.plan.nodes] == ["node0", "node1"]


def _check_nobody_is_left(nodes: Sequence[Node]) -> None:
    for node in nodes:
        wait_until(
            lambda node=node: not any(PROGRAM in command for command in commands_on(node)),  # type: ignore[misc]
            timeout_s=30.0,
            what=f"agents and workers of {node.hostname} have ended",
        )


@contextlib.contextmanager
def _attacks(nodes: Sequence[Node], run_dir: Path) -> Iterator[list[NodeProcess]]:
    attacks = [node.exec(attack_command(run_dir), cwd=ROOT) for node in nodes]
    try:
        yield attacks
    finally:
        for attack in attacks:
            attack.kill()
