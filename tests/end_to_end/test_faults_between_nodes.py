"""Whatever happens to a worker or to a node of a run over SSH: the report names it with its node, and nobody is left.

The workers load nothing of torch; what is tested is who looks after them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import TRACEBACK, user_environ
from tests.kit.nodes.cluster import Cluster, Node, NodeProcess
from tests.kit.nodes.sshd import ssh_between, start_sshd
from tests.kit.packages import need, need_nodes
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.budget(processor_s=10)]

TIMEOUT_S = 240.0
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path

folder, way, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
was_killed = (folder / "killed").exists()
(folder / f"{rank}.began").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
if rank == "1" and way == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if was_killed:
    sys.exit()
if rank == "1" and way == "killed once":
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1" and way == "raises":
    raise ValueError("sample 17 is damaged")
time.sleep(3600)
"""


@dataclass(frozen=True)
class Site:
    """A node to launch from, and two nodes with one worker each."""

    cluster: Cluster
    keys: Path

    @property
    def launcher(self) -> Node:
        return self.cluster.nodes[0]

    @property
    def victim(self) -> Node:
        """The node of rank 1."""
        return self.cluster.nodes[2]

    def start(self, folder: Path, way: str, *options: str) -> NodeProcess:
        """A run whose workers have all begun; rank 1 fails in this `way` once the file "go" is there."""
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "paceline", "launch", "--hosts", "node1:1,node2:1", "--hang-timeout", "5"]
        command += options
        command += ["--out", str(folder / "run"), str(folder / "script.py"), str(folder), way]
        launched = self.launcher.exec(command, env=user_environ(GLOO_SOCKET_IFNAME=""), cwd=folder)

        def have_begun() -> bool:
            assert launched.is_running, launched.output
            return all((folder / f"{rank}.began").exists() for rank in range(2))

        wait_until(have_begun, "both workers have begun", TIMEOUT_S)
        return launched

    def check_nobody_is_left(self, folder: Path) -> None:
        for node in self.cluster.nodes:
            wait_until(
                lambda node=node: not node.is_up or not any(str(folder) in line for line in node.commands()),  # type: ignore[misc]
                f"all processes of the run on {node.hostname} have ended",
                TIMEOUT_S,
            )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need_nodes()
    need("ssh", "sshd")
    keys = tmp_path_factory.mktemp("keys")
    with Cluster(num_nodes=3) as cluster, ssh_between(cluster.nodes, keys):
        yield Site(cluster, keys)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("killed", ("SIGKILL",)),
        pytest.param("raises", ("ValueError: sample 17 is damaged",), marks=pytest.mark.nightly),
    ],
)
def test_a_worker_that_fails_is_named_with_its_node(
    site: Site, way: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    launched = site.start(tmp_path, way)
    (tmp_path / "go").touch()
    check_report(launched, tmp_path, site.victim, words)
    site.check_nobody_is_left(tmp_path)


@pytest.mark.nightly
def test_workers_of_all_nodes_start_again_after_one_has_failed(site: Site, tmp_path: Path) -> None:
    launched = site.start(tmp_path, "killed once", "--max-restarts", "1")
    (tmp_path / "go").touch()
    assert launched.wait(TIMEOUT_S) == 0, launched.output
    assert "Rank 1 of 2" in launched.stderr and "restart 1" in launched.stderr, launched.stderr
    site.check_nobody_is_left(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("event", ["crash", "power_off", "link_down"])
def test_a_node_that_is_lost_is_named(site: Site, event: str, tmp_path: Path) -> None:
    launched = site.start(tmp_path, "waits")
    try:
        getattr(site.victim, event)()
        check_report(launched, tmp_path, site.victim, ())
        if event == "link_down":
            site.victim.link_up()
        site.check_nobody_is_left(tmp_path)
    finally:
        if not site.victim.is_up:
            site.victim.boot()
            start_sshd(site.victim, site.keys)
        site.victim.link_up()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_no_worker_outlives_its_launcher(site: Site, number: signal.Signals, tmp_path: Path) -> None:
    launched = site.start(tmp_path, "waits")
    launched.signal(number)
    assert launched.wait(TIMEOUT_S) != 0
    site.check_nobody_is_left(tmp_path)


def check_report(launched: NodeProcess, folder: Path, culprit: Node, words: tuple[str, ...]) -> None:
    """The run ends, and its report blames rank 1 on this node, in a sentence that the user has read too."""
    assert launched.wait(TIMEOUT_S) != 0
    report: dict[str, Any] = json.loads((folder / "run" / "failure.json").read_text())
    assert (report["ranks"], report["hostname"]) == ([1], culprit.hostname), report
    assert report["sentence"] in launched.stderr
    assert all(word in launched.stderr for word in words), launched.stderr
    ours = "\n".join(line for line in launched.stderr.splitlines() if not line.startswith("[rank "))
    assert TRACEBACK not in ours.replace(report["evidence"].strip(), "")
