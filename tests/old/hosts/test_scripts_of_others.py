"""Scripts of other libraries, unchanged, by each launcher: on two nodes they learn what they learn on one.

Each library meets one launcher (Fabric is in test_apptainer.py), and each way to fail one library: what a launcher
gives to workers does not depend on what their script imports. On one node every library meets every way
(tests/old/ranks/test_plain_torch.py). Agents and workers are forked from a process that has loaded torch, as are the
runs on one node; new processes run Fabric in a container, and jobs by each of these launchers (test_launchers.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.nodes.cluster import Cluster
from tests.kit.nodes.ray_cluster import RAY_VARIABLES, ray_on, why_not_ray
from tests.kit.nodes.slurm import slurm_on
from tests.kit.nodes.sshd import ssh_between
from tests.old.hosts.forked import FORKED
from tests.old.hosts.stdio import commands_on, wait_until
from tests.old.hosts.why_not import why_not_slurm, why_not_ssh
from tests.old.ranks import command_line

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(1500)]

VARIABLES: dict[str, Any] = {"PACELINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SCRIPTS = Path(__file__).parents[1] / "plain_scripts"
TIMEOUT_S = 500.0


@pytest.mark.skipif(bool(why_not_ssh()), reason=why_not_ssh() or "")
def test_over_ssh(cluster: Cluster, loaded_python: str, tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    script = "with_lightning.py"
    with ssh_between(cluster.nodes, tmp_path / "ssh"):
        found = _weights_of(cluster, tmp_path, script, "--hosts", "node0:1,node1:1", "--python", loaded_python)
    assert found == _weights_alone(tmp_path, script)


@pytest.mark.skipif(bool(why_not_ssh()), reason=why_not_ssh() or "")
@pytest.mark.parametrize(
    ("script", "fault", "cause", "words"),
    [
        ("with_fabric.py", "kill", "signal", "killed by SIGKILL"),
        ("with_lightning.py", "hang", "hung", "in read_from_a_disk_that_hangs"),
        ("with_trainer.py", "raise", "exception", "ValueError: sample 17 is damaged"),
    ],
)
def test_what_happens_on_another_node_is_named(
    cluster: Cluster, loaded_python: str, tmp_path: Path, script: str, fault: str, cause: str, words: str
) -> None:
    (tmp_path / "ssh").mkdir()
    with ssh_between(cluster.nodes, tmp_path / "ssh"):
        where = ("--hosts", "node0:1,node1:1", "--python", loaded_python)
        options = ("--hang-timeout", "15", "--out", str(tmp_path / "run"))
        launch = [sys.executable, "-m", "paceline", "launch", *where, *options, str(SCRIPTS / script), fault]
        program = cluster.nodes[0].exec(launch, env=VARIABLES, cwd=tmp_path)
        assert program.wait(TIMEOUT_S) != 0, program.stdout + program.stderr
    report: dict[str, Any] = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (report["cause"], report["ranks"], report["hostname"]) == (cause, [1], "node1"), report
    assert words in report["sentence"] + report["evidence"]


@pytest.mark.skipif(bool(why_not_slurm()), reason=why_not_slurm() or "")
def test_in_an_allocation_of_slurm(cluster: Cluster, loaded_python: str, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    script = "with_accelerate.py"
    with slurm_on(cluster.nodes, tmp_path / "slurm", cpus_per_node=2):
        where = ("--launcher", "slurm", "--python", loaded_python)
        found = _weights_of(cluster, tmp_path, script, *where, within=salloc)
    assert found == _weights_alone(tmp_path, script)


@pytest.mark.skipif(bool(why_not_ray()), reason=why_not_ray() or "")
def test_on_a_ray_cluster(cluster: Cluster, loaded_python: str, tmp_path: Path) -> None:
    inside = ("env", *(f"{name}={value}" for name, value in RAY_VARIABLES.items()))
    script = "with_trainer.py"
    with ray_on(cluster.nodes):
        where = ("--launcher", "ray", "--hosts", "node0:1,node1:1", "--python", loaded_python)
        found = _weights_of(cluster, tmp_path, script, *where, within=inside)
    assert found == _weights_alone(tmp_path, script)


def _weights_alone(cwd: Path, script: str) -> str:
    """What the script prints of its weights after two workers of one node."""
    launch = ("launch", "--threads", "1", "-n", "2", str(SCRIPTS / script))
    return _weights_in(command_line.succeeded(command_line.paceline(*launch, cwd=cwd, **VARIABLES)).stdout)


def _weights_of(cluster: Cluster, cwd: Path, script: str, *where: str, within: Sequence[str] = ()) -> str:
    """What the script prints of its weights, launched on the first node; nobody of it is left anywhere."""
    # How a kernel splits its sums among threads may change their last bits.
    launch = [sys.executable, "-m", "paceline", "launch", "--threads", "1", *where, str(SCRIPTS / script)]
    program = cluster.nodes[0].exec([*within, *launch], env=VARIABLES, cwd=cwd)
    assert program.wait(TIMEOUT_S) == 0, program.stdout + program.stderr
    for node in cluster.nodes:
        wait_until(
            lambda node=node: (
                not any(  # type: ignore[misc]
                    mark in line for line in commands_on(node) for mark in (script, "paceline agent", FORKED)
                )
            ),
            timeout_s=30.0,
            what=f"all processes on {node.hostname} have ended",
        )
    return _weights_in(program.stdout)


def _weights_in(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("weights ")]
    return line
