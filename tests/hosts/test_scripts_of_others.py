"""Scripts of other libraries, unchanged, over plain SSH: on two nodes they learn what they learn on one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.sshd import ssh_between, why_not_ssh
from tests.hosts.stdio import commands_on, wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not_ssh()), reason=why_not_ssh() or ""),
]

SCRIPTS = Path(__file__).parents[1] / "plain_scripts"
TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ssh")
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, folder):
        yield cluster


def weights_of(cluster: Cluster, cwd: Path, script: str, *where: str) -> str:
    """What the script prints of its weights, launched on the first node; nobody of it is left anywhere."""
    # How a kernel splits its sums among threads may change their last bits.
    command = [sys.executable, "-m", "paceline", "launch", "--threads", "1", *where, str(SCRIPTS / script)]
    program = cluster.nodes[0].exec(command, env={"HF_HUB_OFFLINE": "1"}, cwd=cwd)
    assert program.wait(TIMEOUT_S) == 0, program.stdout + program.stderr
    for node in cluster.nodes:
        wait_until(
            lambda node=node: not any(script in line or "paceline agent" in line for line in commands_on(node)),  # type: ignore[misc]
            timeout_s=30.0,
            what=f"all processes on {node.hostname} have ended",
        )
    (line,) = [line for line in program.stdout.splitlines() if line.startswith("weights ")]
    return line


@pytest.mark.parametrize("script", ["with_accelerate.py", "with_fabric.py", "with_lightning.py", "with_trainer.py"])
def test_on_two_nodes_they_learn_what_they_learn_on_one(cluster: Cluster, tmp_path: Path, script: str) -> None:
    expected = weights_of(cluster, tmp_path, script, "-n", "2")
    assert weights_of(cluster, tmp_path, script, "--hosts", "node0:1,node1:1") == expected
