"""The table of faults, on workers made up of nothing: what is said of each, and what an elastic run makes of it."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from paceline.launch import supervise
from paceline.launch.elastic import describe_end
from paceline.launch.failure_report import FailureReport, describe_failure
from paceline.launch.failures import Ending
from paceline.launch.faults import FAULTS, Cause, fault_of
from paceline.launch.fleet import WorkerSlot
from paceline.launch.hang import WorkerState
from paceline.launch.supervise import Outcome, Supervisor
from paceline.launch.team import Events, LaunchOptions, TeamLost
from paceline.spec import NodePlacement, Plan
from paceline.spec.plan import EXCLUDED
from tests.old.unit.launch.test_supervise import NEVER_S, FakeTeam, ending, lost_peer, raised

Happens = Callable[[FakeTeam, int], None]


def ends(one: Callable[[int], Ending]) -> Happens:
    return lambda team, rank: team.exits(one(rank))


def waits(rank: int) -> WorkerState:
    return WorkerState(rank=rank, pid=100 + rank, step=4, collective="all_reduce", inside_s=5.0, heartbeat_age_s=0.1)


def is_in(**state: float | None) -> Happens:
    """The worker is in this state, while all others wait."""

    def happens(team: FakeTeam, rank: int) -> None:
        odd = replace(waits(rank), **state)  # type: ignore[arg-type]
        team.does = lambda other: odd if other == rank else waits(other)

    return happens


def is_cut(team: FakeTeam, _rank: int) -> None:
    team.events.put(TeamLost(team))


def is_silent(team: FakeTeam, _rank: int) -> None:
    team.silent = 9.0


@dataclass(frozen=True)
class Row:
    happens: Happens
    exit_code: int | None
    sentence: str
    short: str


WHO = "Rank {rank} of 4 (pid {pid}{on_node})"

ROWS: dict[tuple[Cause, int | None], Row] = {
    ("exception", None): Row(ends(raised), 1, f"{WHO} failed with ValueError: boom", "raised an error (Traceback)"),
    ("exit", None): Row(
        ends(lambda rank: ending(rank, 3)), 3, f"{WHO} ended with exit code 3.", "left with exit code 3"
    ),
    ("exit", EXCLUDED): Row(
        ends(lambda rank: ending(rank, EXCLUDED)),
        EXCLUDED,
        f"{WHO} ended with exit code {EXCLUDED}.",
        "held the others",
    ),
    ("exit", 143): Row(
        ends(lambda rank: ending(rank, 143)), 143, f"{WHO} was ended by SIGTERM from outside", "left with exit code 143"
    ),
    ("signal", -9): Row(
        ends(lambda rank: ending(rank, -signal.SIGKILL)), -9, f"{WHO} was killed by SIGKILL", "was killed"
    ),
    ("signal", -6): Row(
        ends(lambda rank: ending(rank, -signal.SIGABRT)), -6, f"{WHO} was killed by SIGABRT.", "crashed (SIGABRT)"
    ),
    ("signal", None): Row(
        ends(lambda rank: ending(rank, -signal.SIGSEGV)), -11, f"{WHO} was killed by SIGSEGV.", "crashed (SIGSEGV)"
    ),
    ("out_of_memory", None): Row(
        ends(lambda rank: replace(ending(rank, -signal.SIGKILL), out_of_memory=True)),
        -9,
        f"{WHO} was killed by the kernel: out of memory",
        "ran out of memory",
    ),
    ("lost_touch", None): Row(
        ends(lost_peer), 1, f"{WHO} lost touch with the other workers", "lost touch with the others"
    ),
    ("hung", None): Row(is_in(inside_s=None), None, f"{WHO} hangs in step 5: ranks ", "hung"),
    ("stopped", None): Row(
        is_in(stopped_s=5.0), None, f"{WHO} has been stopped for 5.0 s (SIGSTOP); ranks ", "was stopped"
    ),
    ("mismatch", None): Row(
        is_in(), None, "All 4 workers have waited for each other for 5.0 s", "waited for each other"
    ),
    ("node_silent", None): Row(
        is_silent, None, "Node {node} (ranks {ranks}) has been silent for 9.0", "node {node} was lost"
    ),
    ("node_down", None): Row(is_cut, None, "Node {node} (ranks {ranks}) went down", "node {node} was lost"),
    ("agent_lost", None): Row(is_cut, None, "The agent on node {node} was killed or ended", "node {node} was lost"),
}
PLANS: dict[str, tuple[Plan, list[tuple[str, tuple[int, ...]]]]] = {
    "this node": (Plan(world_size=4), [("", (0, 1, 2, 3))]),
    "two nodes": (
        Plan(world_size=4, nodes=(NodePlacement("a", 2), NodePlacement("b", 2))),
        [("a", (0, 1)), ("b", (2, 3))],
    ),
}
CASES = [
    (fault, place, rank)
    for fault in ROWS
    for place, rank in [("this node", 1), ("two nodes", 1), ("two nodes", 2)]
    if place == "two nodes" or not fault[0].startswith(("node", "agent"))
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CULPRIT_WAIT_S", "OTHERS_WAIT_S", "SETTLE_S"):
        monkeypatch.setattr(supervise, name, 0.01)


def outcome_of(row: Row, place: str, rank: int, *, is_elastic: bool) -> Outcome:
    events: Events = queue.SimpleQueue()
    teams = [FakeTeam(events, ranks, hostname, does=waits) for hostname, ranks in PLANS[place][1]]
    for team in teams:
        team.on_ask = lambda team=team: team.all_end(143)  # type: ignore[misc]
    row.happens(next(team for team in teams if rank in team.ranks), rank)
    timeout_s = 0.2 if row.exit_code is None else NEVER_S
    options = LaunchOptions(Path("no-run-folder"), grace_s=NEVER_S, hang_timeout_s=timeout_s, is_elastic=is_elastic)
    supervisor = Supervisor(teams, events, options)
    supervisor.wait()
    return supervisor.outcome


@pytest.mark.parametrize(("fault", "place", "rank"), CASES, ids=map(str, CASES))
@pytest.mark.parametrize("is_elastic", [False, True], ids=["once", "elastic"])
def test_every_fault_at_every_place(fault: tuple[Cause, int | None], place: str, rank: int, is_elastic: bool) -> None:
    row, (plan, nodes), cause = ROWS[fault], PLANS[place], fault[0]
    began = time.time()
    outcome = outcome_of(row, place, rank, is_elastic=is_elastic)
    answers = {"agent_lost": True, "node_down": False}.get(cause)
    report = describe_failure(outcome, 4, Path("/nowhere"), answers=answers)
    assert report is not None
    node, ranks = next(entry for entry in nodes if rank in entry[1])
    facts = {"rank": rank, "pid": 100 + rank, "node": node, "on_node": f" on {node}" if node else ""}
    facts["ranks"] = ", ".join(map(str, ranks))
    assert (report.cause, report.exit_code) == (cause, row.exit_code)
    assert row.sentence.format_map(facts) in report.sentence
    assert report.ranks == {"mismatch": (0, 1, 2, 3)}.get(cause, ranks if node and is_node(report) else (rank,))
    assert began <= report.noticed_at <= time.time()
    assert "{" not in report.sentence + report.next

    end = describe_end(outcome, plan, Path("/nowhere"))
    assert end.kind == "failed" and row.short.format_map(facts) in end.why
    slots = tuple(WorkerSlot(node, each - ranks[0]) for each in report.ranks)
    assert end.culprits == (slots if FAULTS[fault].blames_workers else ())


def is_node(report: FailureReport) -> bool:
    return report.cause in ("node_silent", "node_down", "agent_lost")


def test_every_row_of_the_table_is_found_and_tested() -> None:
    assert set(ROWS) == set(FAULTS)
    codes = (None, 1, 3, 143, EXCLUDED, -6, -9, -11)
    assert {id(fault_of(cause, code)) for cause, _ in FAULTS for code in codes} == set(map(id, FAULTS.values()))
