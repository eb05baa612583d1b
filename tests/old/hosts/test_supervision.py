"""Whatever happens to a worker, an agent, a node or a link: it is named in time, and nobody is left anywhere.

Workers train where their peers hear of the fault by themselves, and fail too: the report must name the first. Where
nobody but the launcher can notice it, they are processes without torch. Agents that are killed, and workers of theirs
which train, are new processes; the other ones that train are forked.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.nodes.cluster import NodeProcess
from tests.old.hosts.launching import Site, kill_agent, open_site, run_on
from tests.old.hosts.stdio import commands_on
from tests.old.hosts.why_not import why_not_ssh
from tests.old.ranks.launching import wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(why_not_ssh() is not None, reason=why_not_ssh() or ""),
]

BOUND_S = 10.0
"""On a busy machine a worker loads modules of torch for seconds while the others wait for it."""
GRACE_S = 5.0
"""After it was noticed, everybody has ended within this time."""
START_S = 300.0
"""Agents and workers load torch one after the other on a busy machine."""
TRAINS = Path(__file__).with_name("faulty.py")
WAITS = Path(__file__).with_name("waiting.py")
WORKERS = (1, 2)
"""On the second node and on the third."""
CULPRIT = 2
"""The rank that something happens to, one of the third node's."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("keys")) as site:
        yield site


@dataclass
class Training:
    """A run in full swing: rank 0 on the second node, 1 and 2 on the third."""

    site: Site
    stage: Path
    launcher: NodeProcess

    def pid(self, rank: int) -> int:
        """Of a worker, as its node counts."""
        return int((self.stage / f"{rank}.pid").read_text())

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.stage / "run" / "failure.json").read_text())
        return report


def _begin(site: Site, stage: Path, way: str | None, python: str = sys.executable) -> Training:
    """Training whose culprit fails in this `way` once told to, or workers without torch; its agents run in `python`."""
    program = [str(WAITS), str(stage)] if way is None else [str(TRAINS), str(stage), str(CULPRIT), way]
    hosts = ",".join(f"{node.hostname}:{num}" for node, num in zip(site.workers, WORKERS, strict=True))
    launcher = site.launcher.exec(
        [
            *(sys.executable, "-m", "paceline", "launch", "--hosts", hosts, "--hang-timeout", str(BOUND_S)),
            *("--python", python, "--out", str(stage / "run"), *program),
        ]
    )

    def all_are_training() -> bool:
        assert launcher.is_running, launcher.output
        return all((stage / f"{rank}.steps").exists() for rank in range(sum(WORKERS)))

    try:
        wait_until(all_are_training, START_S)
    except BaseException:
        launcher.signal(signal.SIGKILL)  # the next test counts who is left
        print(launcher.output, *(line for node in site.cluster.nodes for line in commands_on(node)), sep="\n")
        raise
    return Training(site, stage, launcher)


Fault = Callable[[Training], None]


def _tell_it(training: Training) -> None:
    (training.stage / "go").touch()


def _signal_rank(number: str) -> Fault:
    return lambda training: run_on(training.site.workers[1], "kill", f"-{number}", str(training.pid(CULPRIT)))


CASES: dict[str, tuple[str | None, Fault, str, tuple[int, ...]]] = {
    # name: what the culprit does when told (None: there is no torch), what happens from outside, the cause in the
    # report, the ranks to blame
    "worker killed": ("none", _signal_rank("KILL"), "signal", (2,)),
    "worker raises": ("raise", _tell_it, "exception", (2,)),
    "worker hangs in Python": ("hang", _tell_it, "hung", (2,)),
    "worker stopped": (None, _signal_rank("STOP"), "stopped", (2,)),
    "node crash": ("none", lambda training: training.site.workers[1].crash(), "node_down", (1, 2)),
    "power off": (None, lambda training: training.site.workers[1].power_off(), "node_silent", (1, 2)),
    "link cut": (None, lambda training: training.site.workers[1].link_down(), "node_silent", (1, 2)),
    "agent killed": (
        "none",
        lambda training: kill_agent(training.site.workers[1]),
        "agent_lost",
        (1, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_in_time_and_nobody_is_left(site: Site, case: str, loaded_python: str, tmp_path: Path) -> None:
    way, fault, cause, ranks = CASES[case]
    is_forked = way is not None and case != "agent killed"
    try:
        training = _begin(site, tmp_path, way, loaded_python if is_forked else sys.executable)
        fault(training)
        happened_at = time.time()  # to start a `kill` on a node takes a good part of a second on a busy machine
        exit_code = training.launcher.wait(BOUND_S + GRACE_S + 15)
        ended_s = time.time() - happened_at
        if (tmp_path / "gone").exists():
            happened_at = float((tmp_path / "gone").read_text())
        report = training.report()
        assert (report["cause"], tuple(report["ranks"])) == (cause, ranks), report
        assert report["noticed_at"] - happened_at <= BOUND_S, report
        assert exit_code == (137 if cause == "signal" else 1)
        assert report["sentence"] in training.launcher.stderr
        # Of a lost node's peers the last beat tells, which may be a few quick steps old.
        assert report["step"] >= (5 if cause not in ("node_down", "node_silent", "agent_lost") else 0)
        assert report["hostname"] == site.workers[1].hostname
        print(f"{case}: noticed after {report['noticed_at'] - happened_at:.2f} s, over after {ended_s:.2f} s")
        if cause == "hung":
            assert "in fail" in report["evidence"] and "faulty.py" in report["evidence"]
        if cause in ("hung", "stopped"):
            waiting = [line for line in report["workers"] if "rank 2" not in line]
            assert len(waiting) == 2 and all("gradients" in line or "in " in line for line in waiting), waiting
        site.workers[1].link_up() if case == "link cut" else None
        site.assert_nobody_left(GRACE_S + BOUND_S, TRAINS.name, WAITS.name)
    finally:
        site.repair()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_outlives_the_launcher(site: Site, number: signal.Signals, tmp_path: Path) -> None:
    if number == signal.SIGINT and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("a test run in the background ignores SIGINT, and so does all that it starts")
    training = _begin(site, tmp_path, None)
    training.launcher.signal(number)
    exit_code = training.launcher.wait(BOUND_S + GRACE_S)
    assert exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    site.assert_nobody_left(GRACE_S + BOUND_S, WAITS.name)
