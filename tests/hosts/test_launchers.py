"""`paceline train` on two nodes by each launcher: it reaches the weights of one process and leaves nobody behind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.spec import RunRecord
from tests.hosts.cluster import Cluster, Node
from tests.hosts.ray_cluster import RAY_VARIABLES, ray_on, why_not_ray
from tests.hosts.slurm import slurm_on, why_not_slurm
from tests.hosts.sshd import ssh_between, why_not_ssh
from tests.hosts.stdio import commands_on, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(900)]

TIMEOUT_S = 500.0
JOB = ("digits-lenet", "--set", "parity=bitwise", "--max-steps", "4", "--quiet")
VARIABLES = {"PACELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(bool(why_not_ssh()), reason=why_not_ssh() or "")
def test_ssh(cluster: Cluster, weights_alone: str, tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    with ssh_between(cluster.nodes, tmp_path / "ssh"):
        record = _train(cluster.nodes[0], tmp_path / "run", workers=["--hosts", "node0:2,node1:2"])
        _check(record, weights_alone, cluster, ["node0", "node1"])


@pytest.mark.skipif(bool(why_not_slurm()), reason=why_not_slurm() or "")
def test_slurm(cluster: Cluster, weights_alone: str, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_on(cluster.nodes, tmp_path / "slurm", cpus_per_node=2):
        salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
        record = _train(cluster.nodes[0], tmp_path / "run", workers=["--launcher", "slurm"], within=salloc)
        _check(record, weights_alone, cluster, ["node0", "node1"])


@pytest.mark.skipif(bool(why_not_ray()), reason=why_not_ray() or "")
def test_ray(cluster: Cluster, weights_alone: str, tmp_path: Path) -> None:
    with ray_on(cluster.nodes):
        inside = ["env", *(f"{name}={value}" for name, value in RAY_VARIABLES.items())]
        workers = ["--launcher", "ray", "-n", "4"]
        record = _train(cluster.nodes[0], tmp_path / "run", workers=workers, within=inside)
        # Without GPUs a node has a worker a core: where there are four cores, the first node is enough for all.
        _check(record, weights_alone, cluster, [node.hostname for node in record.plan.nodes])


def command_alone(run_dir: Path) -> list[str]:
    return _command(run_dir, ["-n", "1"])


def _command(run_dir: Path, workers: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "paceline", "train", *JOB, "--out", str(run_dir), *workers]


def _train(node: Node, run_dir: Path, *, workers: Sequence[str], within: Sequence[str] = ()) -> RunRecord:
    training = node.exec([*within, *_command(run_dir, workers)], env=VARIABLES)
    assert training.wait(TIMEOUT_S) == 0, training.output
    return RunRecord.load(run_dir / "record.json")


def _check(record: RunRecord, weights_alone: str, cluster: Cluster, hostnames: Sequence[str]) -> None:
    assert record.weights_sha256 == weights_alone
    assert record.plan.world_size == 4
    assert [share.hostname for share in record.plan.nodes] == hostnames
    for node in cluster.nodes:
        wait_until(
            lambda node=node: not any("paceline" in command for command in commands_on(node)),  # type: ignore[misc]
            timeout_s=10.0,
            what=f"agents and workers of {node.hostname} have ended",
        )
