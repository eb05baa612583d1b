"""A run folder on a file server, which each node sees by a view of its own (`folder_view.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.nodes.cluster import Cluster, Node, NodeProcess
from tests.old.hosts.folder_view import folder_seen_from, why_no_views
from tests.old.hosts.why_not import why_not_ssh

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_views()), reason=why_no_views() or ""),
]

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
HOLDER = """
import sys, threading
from pathlib import Path
from paceline import run_lease
run_lease._STANDSTILL_S = 20.0
with run_lease.hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    threading.Event().wait()
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "options",
    [("--remember", "6"), ("--late", "0.02", "--refuse", "link=EPERM,lock=ENOLCK")],
    ids=["remembered", "late, without links and locks"],
)
def test_two_nodes_do_not_use_one_folder(cluster: Cluster, tmp_path: Path, options: tuple[str, ...]) -> None:
    server, place = tmp_path / "server", tmp_path / "place"
    server.mkdir()
    place.mkdir()
    here, there = cluster.nodes
    with folder_seen_from(cluster.nodes, server, place, *options):
        first = _hold(here, place)
        first.expect("held", PATIENCE_S)
        second = _hold(there, place)
        assert second.wait(PATIENCE_S) == 1
        assert f"{place} is in use by process" in second.output and "on node0" in second.output
        first.kill()
        third = _hold(there, place)
        third.expect("was in use by a run on node0", PATIENCE_S)
        third.expect("held", PATIENCE_S)
        third.kill()
        fourth = _hold(there, place)  # of a process that is seen from here it is known at once that it has ended
        fourth.expect("held", PATIENCE_S)
        fourth.kill()
        assert "was in use" not in fourth.output


@pytest.mark.skipif(bool(why_not_ssh()), reason=why_not_ssh() or "")
@pytest.mark.timeout(900)
def test_runs_on_servers_with_troubles(loaded_python: str, tmp_path: Path) -> None:
    """A part of what `python -m benchmarks.survival.shared_folders` tries."""
    cases = "remembered for 30 s,quota in the middle,deleted in the middle"
    options = ["--only", cases, "--out", str(tmp_path), "--python", loaded_python]
    command = [sys.executable, "-m", "benchmarks.survival.shared_folders", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _hold(node: Node, folder: Path) -> NodeProcess:
    return node.exec([sys.executable, "-c", HOLDER, str(folder)])
