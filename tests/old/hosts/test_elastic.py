"""A run on several nodes outlives the loss of one, and takes it back.

Where workers need torch, they and the agents of their nodes are forked from a process that has loaded it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.nodes.cluster import NodeProcess
from tests.kit.nodes.sshd import start_sshd
from tests.old.hosts.launching import Site, kill_agent, open_site
from tests.old.hosts.why_not import why_not_ssh
from tests.old.ranks.launching import COUNT_TO_THE_END, COUNTING_WITHOUT_TORCH, TO_THE_END, Stage

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(540),
    pytest.mark.skipif(why_not_ssh() is not None, reason=why_not_ssh() or ""),
]

BOUND_S = 10.0
START_S = 300.0
END_S = 60.0
WITHOUT_TORCH = COUNTING_WITHOUT_TORCH + TO_THE_END
"""Where workers do not have to meet again on other nodes."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("keys")) as site:
        yield site


@pytest.fixture
def stage(tmp_path: Path, site: Site) -> Iterator[Stage]:
    """Processes announce themselves by pids of their nodes, which mean nothing here."""
    try:
        yield Stage(tmp_path)
        site.assert_nobody_left(10.0)
    finally:
        site.repair()


def _begin(
    site: Site, stage: Stage, body: str, min_workers: int, *options: str, python: str = sys.executable
) -> NodeProcess:
    hosts = ",".join(f"{node.hostname}:2" for node in site.workers)
    launcher = site.launcher.exec(
        [
            *(sys.executable, "-m", "paceline", "launch", "--hosts", hosts, "--hang-timeout", str(BOUND_S)),
            *("--min-workers", str(min_workers), "--python", python, *options),
            *("--out", str(stage.run_dir), stage.script(body)),
        ]
    )
    _await_training(stage, launcher, 0, 4)
    return launcher


def _await_training(stage: Stage, launcher: NodeProcess, generation: int, world_size: int) -> None:
    names = [f"begun.{generation}.{rank}" for rank in range(world_size)]
    try:
        stage.await_marks(*names, timeout_s=START_S)
    except BaseException:
        print(launcher.output)
        raise
    assert {(stage.folder / name).read_text() for name in names} == {str(world_size)}


def _generations(stage: Stage, launcher: NodeProcess) -> list[dict[str, Any]]:
    """Of a run that is now let to its end, where every step was counted exactly once."""
    (stage.folder / "finish").touch()
    assert launcher.wait(END_S) == 0, launcher.output
    (counted,) = (line.split() for line in launcher.stdout.splitlines() if line.startswith("counted"))
    assert float(counted[2]) == 12 * int(counted[1])
    found: list[dict[str, Any]] = json.loads((stage.run_dir / "elastic.json").read_text())["generations"]
    return found


def test_a_node_loses_power_and_comes_back(site: Site, stage: Stage, loaded_python: str) -> None:
    launcher = _begin(site, stage, COUNT_TO_THE_END, 1, python=loaded_python)
    first, second = site.workers
    first.power_off()  # the node where the workers met
    _await_training(stage, launcher, 1, 2)
    first.boot()
    start_sshd(first, site.keys)
    _await_training(stage, launcher, 2, 4)
    lost, grown, done = _generations(stage, launcher)
    assert lost["why"].startswith(f"node {first.hostname} was lost at step ")
    assert (grown["nodes"], done["nodes"]) == ({second.hostname: 2}, {first.hostname: 2, second.hostname: 2})
    assert int((stage.folder / "saved.1").read_text()) == grown["step"]  # nothing was lost when it grew
    assert "going on with 2 workers" in launcher.stderr and "going on with 4 workers" in launcher.stderr
    assert json.loads((stage.run_dir / "failure-1.json").read_text())["cause"] == "node_silent"
    print([one["recovery_s"] for one in (lost, grown)])


def test_an_agent_that_is_killed_is_started_again(site: Site, stage: Stage) -> None:
    launcher = _begin(site, stage, WITHOUT_TORCH, 4)  # so the run waits for it
    kill_agent(site.workers[1])
    _await_training(stage, launcher, 1, 4)
    lost, _ = _generations(stage, launcher)
    assert lost["why"].startswith(f"node {site.workers[1].hostname} was lost at step ")


def test_too_few_nodes_are_the_end(site: Site, stage: Stage) -> None:
    launcher = _begin(site, stage, WITHOUT_TORCH, 3, "--no-standby")  # which would load torch for nothing
    site.workers[1].crash()
    assert launcher.wait(END_S) == 1, launcher.output
    assert "went down: its connection was closed" in launcher.stderr
    assert "with room for 2 workers left, fewer than min_workers = 3, it does not go on." in launcher.stderr
