"""A run watched to its end, with teams made up of nothing but what they answer."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from paceline.launch import supervise
from paceline.launch.failures import Ending, Failure
from paceline.launch.hang import Hang, WorkerState, interval_s
from paceline.launch.supervise import Outcome, Supervisor
from paceline.launch.team import Events, LaunchOptions, Signalled, Team, TeamLost, WorkerExited

NEVER_S = 600.0
"""A wait that would end in the timeout of the test."""
SOON_S = 0.02
NOWHERE = Path("no-run-folder")

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:18315"


def ending(rank: int, exit_code: int = 0, type: str = "", message: str = "") -> Ending:
    failure = None
    if type:
        failure = Failure(rank, 100 + rank, time.time(), type, message, traceback="Traceback\n")
    return Ending(rank, 100 + rank, exit_code, time.time(), failure)


def raised(rank: int) -> Ending:
    return ending(rank, 1, "ValueError", "boom")


def lost_peer(rank: int) -> Ending:
    return ending(rank, 1, "RuntimeError", LOST)


@dataclass(eq=False)
class FakeTeam:
    """Workers that end when the test says so: `on_ask`, `on_kill` and `on_collect` are what happens then."""

    events: Events
    ranks: Sequence[int]
    hostname: str = ""
    on_ask: Callable[[], None] = lambda: None
    on_kill: Callable[[], None] | None = None
    on_collect: Callable[[int], None] = lambda _rank: None
    does: Callable[[int], WorkerState] = lambda rank: WorkerState(rank=rank, pid=100 + rank, step=4)
    silent: float = 0.0
    calls: list[str] = field(default_factory=list)
    num_prepared: int = 0
    ends: dict[int, Ending] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._running = list(self.ranks)

    def exits(self, *endings: Ending) -> None:
        for one in endings:
            self.ends[one.rank] = one
            self.events.put(WorkerExited(self, one.rank))

    def all_end(self, exit_code: int) -> None:
        self.exits(*(ending(rank, exit_code) for rank in self._running if rank not in self.ends))

    @property
    def running(self) -> Sequence[int]:
        return tuple(self._running)

    def collect(self, rank: int) -> Ending:
        self._running.remove(rank)
        self.on_collect(rank)
        return self.ends[rank]

    def states(self) -> list[WorkerState]:
        return [self.does(rank) for rank in self._running]

    def silent_s(self) -> float:
        return self.silent

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        self.calls.append(f"stacks {list(ranks)}")
        return {rank: f"stack of {rank}" for rank in ranks if rank in self._running}

    def prepare_standby(self) -> None:
        self.num_prepared += 1

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        name = {signal.SIGUSR1: "save", signal.SIGTERM: "ask", signal.SIGKILL: "kill"}[signal.Signals(number)]
        self.calls.append(name if ranks is None else f"{name} {list(ranks)}")
        if number == signal.SIGTERM:
            self.on_ask()
        elif number == signal.SIGKILL:
            self._is_killed(ranks)

    def _is_killed(self, ranks: Sequence[int] | None) -> None:
        if ranks is not None:
            self.exits(*(ending(rank, -signal.SIGKILL) for rank in ranks))
        elif self.on_kill is None:
            self.all_end(-signal.SIGKILL)
        else:
            self.on_kill()

    def close(self) -> None:
        raise AssertionError("who opened a team closes it")


@pytest.fixture
def events() -> Events:
    return queue.SimpleQueue()


def watch(
    events: Events, *teams: FakeTeam, grace_s: float = NEVER_S, hang_timeout_s: float = NEVER_S
) -> tuple[Supervisor, Outcome]:
    members: Sequence[Team] = teams
    supervisor = Supervisor(members, events, LaunchOptions(NOWHERE, grace_s=grace_s, hang_timeout_s=hang_timeout_s))
    supervisor.wait()
    return supervisor, supervisor.outcome


def ends_when_asked(team: FakeTeam) -> FakeTeam:
    team.on_ask = lambda: team.all_end(128 + signal.SIGTERM)
    return team


def codes(outcome: Outcome) -> dict[int, int]:
    return {one.rank: one.exit_code for one in outcome.endings}


def test_a_run_that_goes_well_is_left_alone(events: Events) -> None:
    team = FakeTeam(events, [0, 1])
    team.exits(ending(1), ending(0))
    _, outcome = watch(events, team)
    assert codes(outcome) == {1: 0, 0: 0}
    assert outcome.stopped_at == float("inf")
    assert team.calls == []
    assert (outcome.hang, outcome.losses, outcome.states, outcome.interrupted_by) == (None, (), (), None)


@pytest.mark.parametrize("first", [raised(1), ending(1, 3), ending(1, -signal.SIGSEGV)], ids=["raises", "code", "dies"])
def test_the_first_failure_asks_all_to_end_at_once(events: Events, first: Ending) -> None:
    here, there = (
        ends_when_asked(FakeTeam(events, ranks, f"node{number}")) for number, ranks in enumerate([(0, 1), (2,)])
    )
    here.exits(first)
    before = time.time()
    _, outcome = watch(events, here, there)
    assert (here.calls, there.calls) == (["ask"], ["ask"])
    assert before <= outcome.stopped_at <= time.time()
    assert codes(outcome) == {1: first.exit_code, 0: 143, 2: 143}
    assert {one.rank: one.hostname for one in outcome.endings} == {0: "node0", 1: "node0", 2: "node1"}
    # What the others were doing when it was seen.
    assert [state.rank for state in outcome.states] == [0, 2]


def test_who_does_not_end_within_the_grace_is_killed(events: Events) -> None:
    team = FakeTeam(events, [0, 1, 2])
    team.on_ask = lambda: team.exits(ending(0, 143))  # rank 2 does not hear
    team.exits(raised(1))
    _, outcome = watch(events, team, grace_s=SOON_S)
    assert team.calls == ["ask", "kill"]
    assert codes(outcome) == {1: 1, 0: 143, 2: -signal.SIGKILL}


def test_a_consequence_waits_for_the_culprit(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "CULPRIT_WAIT_S", NEVER_S)
    team = ends_when_asked(FakeTeam(events, [0, 1, 2]))
    asked_before: list[int] = []

    def next_death(rank: int) -> None:
        asked_before.extend([rank] * len(team.calls))
        if rank == 0:
            team.exits(lost_peer(2))
        if rank == 2:
            team.exits(raised(1))

    team.on_collect = next_death
    team.exits(lost_peer(0))
    _, outcome = watch(events, team)
    assert asked_before == []
    assert team.calls == ["ask"]
    assert [one.rank for one in outcome.endings] == [0, 2, 1]
    assert all(one.time <= outcome.stopped_at for one in outcome.endings)


def test_a_consequence_without_a_culprit_ends_the_run_too(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "CULPRIT_WAIT_S", SOON_S)
    team = ends_when_asked(FakeTeam(events, [0, 1]))
    team.exits(lost_peer(0))
    _, outcome = watch(events, team)
    assert team.calls == ["ask"]
    assert codes(outcome) == {0: 1, 1: 143}


def holds_up(culprit: int) -> Callable[[int], WorkerState]:
    """Everybody waits but one."""
    waiting = WorkerState(rank=0, pid=0, step=4, collective="all_reduce", inside_s=5.0, heartbeat_age_s=0.1)
    return lambda rank: replace(waiting, rank=rank, pid=100 + rank, inside_s=None if rank == culprit else 5.0)


def test_a_hang_is_found_and_its_stack_is_asked_for_before_the_end(events: Events) -> None:
    teams = [ends_when_asked(FakeTeam(events, ranks, does=holds_up(2))) for ranks in [(0, 1), (2, 3)]]
    before = time.time()
    _, outcome = watch(events, *teams, hang_timeout_s=0.1)
    assert outcome.hang == Hang("hung", (2,), (0, 1, 3), 5.0)
    assert before <= outcome.hang_at <= outcome.stopped_at
    assert [state.rank for state in outcome.states] == [0, 1, 2, 3]
    assert outcome.stacks == ((2, "stack of 2"),)
    assert [team.calls for team in teams] == [["stacks [2]", "ask"]] * 2
    assert set(codes(outcome).values()) == {143}


def test_one_that_is_stopped_is_not_asked_for_its_stack(events: Events) -> None:
    team = ends_when_asked(FakeTeam(events, [0, 1]))
    team.does = lambda rank: WorkerState(rank=rank, pid=100 + rank, stopped_s=5.0 if rank == 1 else None)
    _, outcome = watch(events, team, hang_timeout_s=0.1)
    assert outcome.hang == Hang("stopped", (1,), (), 5.0)
    assert (team.calls, outcome.stacks) == (["ask"], ())


def test_one_that_hangs_and_does_not_hear_is_killed(events: Events) -> None:
    team = FakeTeam(events, [0, 1], does=holds_up(1))
    _, outcome = watch(events, team, grace_s=SOON_S, hang_timeout_s=0.1)
    assert team.calls == ["stacks [1]", "ask", "kill"]
    assert outcome.hang is not None and outcome.hang.culprits == (1,)


def test_workers_that_end_one_by_one_are_no_hang(events: Events) -> None:
    team = FakeTeam(events, [0, 1])
    looks: list[int] = []

    def does(rank: int) -> WorkerState:
        looks.append(rank)
        if len(looks) == 6:  # computing for many intervals, then done
            team.all_end(0)
        return WorkerState(rank=rank, pid=100 + rank)

    team.does = does
    _, outcome = watch(events, team, hang_timeout_s=0.1)
    assert (outcome.hang, team.calls, set(codes(outcome).values())) == (None, [], {0})


def test_a_hang_is_named_once_however_long_the_end_takes(events: Events) -> None:
    team = FakeTeam(events, [0, 1], does=holds_up(0))
    _, outcome = watch(events, team, grace_s=0.1, hang_timeout_s=0.05)  # many looks fit into the grace
    assert team.calls == ["stacks [0]", "ask", "kill"]
    assert outcome.hang == Hang("hung", (0,), (1,), 5.0)


def test_a_team_whose_connection_ends_is_lost_with_its_workers(events: Events) -> None:
    here = ends_when_asked(FakeTeam(events, [0, 1], "here"))
    there = FakeTeam(events, [2, 3], "there")
    events.put(TeamLost(there))
    _, outcome = watch(events, here, there)
    (loss,) = outcome.losses
    assert (loss.hostname, loss.ranks, loss.silent_s, loss.was_stopping) == ("there", (2, 3), None, False)
    assert "ask" in here.calls
    assert codes(outcome) == {0: 143, 1: 143}
    assert [state.rank for state in outcome.states] == [0, 1]


def test_a_silent_node_is_lost_once(events: Events) -> None:
    here = FakeTeam(events, [0], "here")
    there = FakeTeam(events, [1], "there", silent=9.0)

    # The connection breaks as well, and the worker's end is heard of after all.
    def too_late() -> None:
        events.put(TeamLost(there))
        events.put(WorkerExited(there, 1))
        here.all_end(143)

    here.on_ask = too_late
    _, outcome = watch(events, here, there, hang_timeout_s=0.1)
    (loss,) = outcome.losses
    assert (loss.hostname, loss.ranks, loss.silent_s) == ("there", (1,), 9.0)
    assert codes(outcome) == {0: 143}
    assert outcome.hang is None


def test_a_silent_node_is_lost_and_its_workers_do_not_hang(events: Events) -> None:
    """The others may have waited for its workers before it fell silent, and so reach the bound earlier."""
    here, there = FakeTeam(events, [0], "here"), FakeTeam(events, [1], "there", silent=0.035)
    looks: list[int] = []

    def does(rank: int) -> WorkerState:
        looks.append(rank)
        there.silent = 0.035 if len(looks) < 4 else 9.0  # of the bound of 0.06 s
        return holds_up(1)(rank)

    here.does = there.does = does
    here.on_ask = lambda: here.all_end(143)
    _, outcome = watch(events, here, there, hang_timeout_s=0.1)
    assert outcome.hang is None
    assert [(loss.hostname, loss.silent_s) for loss in outcome.losses] == [("there", 9.0)]


def test_a_node_that_falls_silent_while_the_run_ends_is_not_waited_for(events: Events) -> None:
    here, there = FakeTeam(events, [0], "here"), FakeTeam(events, [1], "there")

    def cut() -> None:
        there.silent = 9.0

    there.on_kill = cut  # and its worker is not heard of again
    here.exits(raised(0))
    _, outcome = watch(events, here, there, grace_s=SOON_S, hang_timeout_s=0.1)
    assert codes(outcome) == {0: 1}
    assert [(loss.hostname, loss.ranks, loss.was_stopping) for loss in outcome.losses] == [("there", (1,), True)]


def test_all_nodes_lost_is_an_end(events: Events) -> None:
    teams = [FakeTeam(events, [number], f"node{number}") for number in range(2)]
    for team in teams:
        events.put(TeamLost(team))
    _, outcome = watch(events, *teams)
    assert [(loss.hostname, loss.was_stopping) for loss in outcome.losses] == [("node0", False), ("node1", True)]
    assert outcome.endings == ()


def test_a_node_without_workers_left_may_go(events: Events) -> None:
    here, there = FakeTeam(events, [0], "here"), FakeTeam(events, [1], "there")
    there.exits(ending(1))
    events.put(TeamLost(there))
    here.exits(ending(0))
    _, outcome = watch(events, here, there)
    assert (here.calls, outcome.stopped_at) == ([], float("inf"))
    assert [loss.ranks for loss in outcome.losses] == [()]


def test_a_signal_asks_and_a_second_one_kills(events: Events) -> None:
    team = FakeTeam(events, [0, 1])
    team.on_ask = lambda: events.put(Signalled(signal.SIGTERM))
    events.put(Signalled(signal.SIGINT))
    _, outcome = watch(events, team)
    assert team.calls == ["ask", "kill"]
    assert outcome.interrupted_by == signal.SIGINT
    assert set(codes(outcome).values()) == {-signal.SIGKILL}


def test_a_signal_after_a_failure_hurries_but_is_no_cause(events: Events) -> None:
    team = FakeTeam(events, [0, 1])
    team.on_ask = lambda: events.put(Signalled(signal.SIGINT))
    team.exits(raised(0))
    _, outcome = watch(events, team)
    assert team.calls == ["ask", "kill"]
    assert outcome.interrupted_by is None


def test_a_signal_while_the_culprit_is_awaited_ends_the_wait(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "CULPRIT_WAIT_S", NEVER_S)
    team = ends_when_asked(FakeTeam(events, [0, 1]))
    team.exits(lost_peer(0))
    events.put(Signalled(signal.SIGINT))
    _, outcome = watch(events, team)
    assert team.calls == ["ask"]
    assert outcome.interrupted_by is None


def test_a_signal_after_the_last_worker_is_still_noted(events: Events) -> None:
    team = FakeTeam(events, [0])
    team.exits(ending(0))
    supervisor, outcome = watch(events, team)
    assert outcome.interrupted_by is None
    events.put(TeamLost(team))
    events.put(Signalled(signal.SIGTERM))
    supervisor.drain()
    assert events.empty()
    assert supervisor.outcome.interrupted_by == signal.SIGTERM
    assert team.calls == []


@pytest.mark.parametrize("hang_timeout_s", [0.1, 3.0, 60.0, 600.0])
def test_the_bound_leaves_room_for_every_look(hang_timeout_s: float) -> None:
    assert 0 < interval_s(hang_timeout_s) <= min(1.0, hang_timeout_s / 10)


def is_elastic(events: Events, *teams: FakeTeam, could_grow: Callable[[], bool] = lambda: False) -> Outcome:
    members: Sequence[Team] = teams
    options = LaunchOptions(NOWHERE, grace_s=NEVER_S, hang_timeout_s=0.1, is_elastic=True)
    supervisor = Supervisor(members, events, options, could_grow=could_grow)
    supervisor.wait()
    return supervisor.outcome


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "SETTLE_S", SOON_S)
    monkeypatch.setattr(supervise, "OTHERS_WAIT_S", SOON_S)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("first", [ending(1, -signal.SIGKILL), raised(1), ending(1, 3)], ids=["dies", "raises", "code"])
def test_who_would_wait_for_ever_is_killed_where_a_run_goes_on(events: Events, first: Ending) -> None:
    team = FakeTeam(events, [0, 1, 2])
    team.exits(first)
    outcome = is_elastic(events, team)
    assert team.calls == ["kill"]
    assert codes(outcome) == {1: first.exit_code, 0: -signal.SIGKILL, 2: -signal.SIGKILL}


def test_who_notices_and_ends_is_not_killed(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "SETTLE_S", NEVER_S)
    team = FakeTeam(events, [0, 1, 2])
    team.on_collect = lambda rank: team.exits(lost_peer(0), lost_peer(2)) if rank == 1 else None
    team.exits(ending(1, -signal.SIGKILL))
    outcome = is_elastic(events, team)
    assert team.calls == []
    assert codes(outcome) == {1: -signal.SIGKILL, 0: 1, 2: 1}
    assert outcome.stopped_at <= min(one.time for one in outcome.endings if one.rank != 1) + 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("saves_in_time", [True, False])
def test_who_saves_what_it_has_gets_the_time_for_that(events: Events, saves_in_time: bool) -> None:
    team = FakeTeam(events, [0, 1], does=lambda rank: WorkerState(rank=rank, pid=100 + rank, is_saving=True))
    ends_later = threading.Timer(0.3, lambda: team.exits(lost_peer(0)))
    team.on_collect = lambda rank: ends_later.start() if rank == 1 else None
    team.exits(ending(1, -signal.SIGKILL))
    save_s = NEVER_S if saves_in_time else 0.1
    options = LaunchOptions(NOWHERE, grace_s=NEVER_S, save_s=save_s, hang_timeout_s=NEVER_S, is_elastic=True)
    Supervisor([team], events, options).wait()
    ends_later.cancel()
    assert team.calls == ([] if saves_in_time else ["kill"])


@pytest.mark.usefixtures("quick")
def test_those_that_hang_are_killed_before_the_others_where_a_run_goes_on(events: Events) -> None:
    team = FakeTeam(events, [0, 1], does=holds_up(1))
    outcome = is_elastic(events, team)
    assert outcome.hang is not None
    assert team.calls == ["stacks [1]", "kill [1]", "kill"]


def test_a_run_that_goes_on_listens_whether_all_raise_the_same(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "OTHERS_WAIT_S", NEVER_S)
    team = FakeTeam(events, [0, 1])
    team.on_collect = lambda rank: team.exits(raised(1)) if rank == 0 else None
    team.exits(raised(0))
    outcome = is_elastic(events, team)
    assert team.calls == []
    assert codes(outcome) == {0: 1, 1: 1}


def test_who_waits_for_others_will_raise_nothing_of_its_own(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "OTHERS_WAIT_S", NEVER_S)
    monkeypatch.setattr(supervise, "SETTLE_S", SOON_S)
    team = FakeTeam(events, [0, 1, 2], does=lambda rank: WorkerState(rank=rank, pid=100 + rank, inside_s=0.01))
    team.exits(raised(0))
    is_elastic(events, team)
    assert team.calls == ["kill"]


def test_a_run_is_ended_to_grow_once_all_have_trained(events: Events) -> None:
    team = ends_when_asked(FakeTeam(events, [0, 1]))
    looks = 3

    def has_trained(rank: int) -> bool:
        return rank == 0 or team.num_prepared >= looks

    team.does = lambda rank: WorkerState(rank=rank, pid=100 + rank, trained_s=9.0 if has_trained(rank) else None)
    outcome = is_elastic(events, team, could_grow=lambda: has_trained(1) or pytest.fail("one has not trained"))
    assert (team.calls, outcome.ended_to_grow, outcome.hang) == (["ask"], True, None)
    assert outcome.trained_at is not None and 8.5 < time.time() - outcome.trained_at < 60
    assert set(codes(outcome).values()) == {143}


def test_a_signal_while_a_run_ends_to_grow_does_not_hurry_it(events: Events) -> None:
    team = FakeTeam(events, [0], does=lambda rank: WorkerState(rank=rank, pid=100 + rank, trained_s=1.0))

    def interrupted() -> None:
        events.put(Signalled(signal.SIGTERM))
        team.all_end(143)

    team.on_ask = interrupted
    outcome = is_elastic(events, team, could_grow=lambda: True)
    assert (team.calls, outcome.ended_to_grow) == (["ask"], True)


def test_a_signal_after_a_failure_is_remembered(events: Events) -> None:
    team = FakeTeam(events, [0, 1])

    def interrupted() -> None:
        events.put(Signalled(signal.SIGTERM))
        team.all_end(-signal.SIGKILL)

    team.on_kill = interrupted
    team.exits(ending(0, -signal.SIGSEGV))
    outcome = is_elastic(events, team)
    assert (outcome.signalled, outcome.interrupted_by) == (signal.SIGTERM, None)


def test_a_wish_to_save_is_passed_on(events: Events) -> None:
    team = FakeTeam(events, [0, 1])
    events.put(Signalled(signal.SIGUSR1))
    team.exits(ending(0), ending(1))
    _, outcome = watch(events, team)
    assert (team.calls, outcome.interrupted_by, outcome.signalled) == (["save"], None, None)


@pytest.mark.parametrize(("number", "calls"), [(signal.SIGINT, ["ask", "kill"]), (signal.SIGTERM, ["ask"])])
def test_who_saves_has_longer_than_who_is_interrupted(events: Events, number: int, calls: list[str]) -> None:
    team = FakeTeam(events, [0])
    ends_later = threading.Timer(0.3, lambda: team.all_end(143))
    team.on_ask = ends_later.start
    events.put(Signalled(number))
    options = LaunchOptions(NOWHERE, grace_s=SOON_S, save_s=NEVER_S, hang_timeout_s=NEVER_S)
    Supervisor([team], events, options).wait()
    ends_later.cancel()
    assert team.calls == calls
