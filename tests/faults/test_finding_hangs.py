"""Which workers hold up a run, judged from what all of them are doing: never one that waits for another, never one that
only computes for long, and never for time in which the observer itself stood still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.diagnosis.failures import STALE_S, Hang, WorkerState, find_hang
from paceline.train.peers import WatchClock

BOUND_S = 3.0


def waits(rank: int, inside_s: float = 5.0, collective: str = "all_reduce number 4") -> WorkerState:
    return WorkerState(rank=rank, pid=100 + rank, step=4, collective=collective, inside_s=inside_s, heartbeat_age_s=0.1)


def computes(rank: int) -> WorkerState:
    return WorkerState(rank=rank, pid=100 + rank, step=4, collective="all_reduce number 3", heartbeat_age_s=0.1)


NATIVE = replace(waits(1), heartbeat_age_s=STALE_S + 0.1)
"""Stuck outside Python: what it said last is not believed."""


CASES: dict[str, tuple[list[WorkerState], Hang | None]] = {
    "no worker": ([], None),
    "all compute": ([computes(0), computes(1)], None),
    "one does not come": ([waits(0, 4.0), computes(1), waits(2, 5.0)], Hang("hung", (1,), (0, 2), 5.0)),
    "two do not come": ([computes(0), computes(1), waits(2)], Hang("hung", (0, 1), (2,), 5.0)),
    "one does not come, but not for long": ([waits(0, 2.9), computes(1)], None),
    "the last has just come": ([waits(0), waits(1, 0.1)], None),
    "one is stuck in native code": ([waits(0), NATIVE], Hang("hung", (1,), (0,), 5.0)),
    "different collectives": (
        [waits(0, 4.0, "all_reduce"), waits(1, 5.0, "broadcast")],
        Hang("mismatch", (0, 1), (0, 1), 5.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_who_holds_up_a_run(name: str) -> None:
    states, expected = CASES[name]
    assert find_hang(states, BOUND_S) == expected


seconds = st.floats(0, 10)
teams = st.lists(
    st.builds(
        WorkerState,
        rank=st.integers(0, 9),
        pid=st.integers(1, 9),
        collective=st.sampled_from(["", "all_reduce", "broadcast"]),
        inside_s=st.none() | seconds,
        heartbeat_age_s=st.none() | seconds,
    ),
    max_size=6,
    unique_by=lambda state: state.rank,
)
bounds = st.floats(0.1, 8)


def is_waiting(state: WorkerState, bound_s: float) -> bool:
    is_stuck = state.heartbeat_age_s is not None and state.heartbeat_age_s >= STALE_S
    return not is_stuck and state.inside_s is not None and state.inside_s >= bound_s


@given(teams, bounds)
def test_no_worker_that_waits_is_blamed_while_another_does_not_wait(team: list[WorkerState], bound_s: float) -> None:
    found = find_hang(team, bound_s)
    if found is None:
        return
    waiting = {state.rank for state in team if is_waiting(state, bound_s)}
    assert found.culprits and set(found.waiting) == waiting
    if len(waiting) == len(team):
        assert (found.kind, set(found.culprits)) == ("mismatch", waiting)
    else:
        assert found.kind != "mismatch" and not waiting & set(found.culprits)


@given(teams, bounds)
def test_somebody_is_blamed_as_soon_as_one_waits_and_another_is_elsewhere(
    team: list[WorkerState], bound_s: float
) -> None:
    is_elsewhere = any(state.inside_s is None for state in team)
    if is_elsewhere and any(is_waiting(state, bound_s) for state in team):
        assert find_hang(team, bound_s) is not None


@given(teams, bounds)
def test_nobody_is_blamed_before_the_bound(team: list[WorkerState], bound_s: float) -> None:
    def shortened(value_s: float | None) -> float | None:
        return None if value_s is None else min(value_s, 0.99 * bound_s)

    short = [replace(state, inside_s=shortened(state.inside_s)) for state in team]
    assert find_hang(short, bound_s) is None


@given(teams, bounds)
def test_the_order_of_the_workers_does_not_matter(team: list[WorkerState], bound_s: float) -> None:
    def facts(hang: Hang | None) -> object:
        return hang and (hang.kind, set(hang.culprits), set(hang.waiting), hang.seconds)

    by_rank = sorted(team, key=lambda state: state.rank)
    assert facts(find_hang(team, bound_s)) == facts(find_hang(by_rank, bound_s))


class Clock:
    """Read every second, except while everything stands still."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.watch = WatchClock(10.0, lambda: self.time_s)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.pause(1.0)

    def pause(self, seconds: float) -> None:
        self.time_s += seconds
        self.watch.watched_s(0.0)


def test_time_in_which_the_observer_stood_still_does_not_count() -> None:
    clock = Clock()
    clock.run(10)
    clock.pause(5.0)
    assert clock.watch.watched_s(10.0) == 6.0  # 5 s before the pause, and the second in which it should have looked
    clock.run(20)
    clock.pause(1000.0)
    clock.run(3)
    assert clock.watch.watched_s(3.0) == 3.0
    assert clock.watch.watched_s(23.0) == 3.0  # began within the second pause
    assert clock.watch.watched_s(1023.0) == 24.0
    assert clock.watch.watched_s(1033.0) == 30.0


def test_an_observer_that_is_a_little_late_did_not_stand_still() -> None:
    clock = Clock()
    for _ in range(10):
        clock.pause(1.9)
    assert clock.watch.watched_s(19.0) == 19.0
