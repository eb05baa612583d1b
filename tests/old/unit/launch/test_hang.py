"""Whom a judgement over all workers may name, and when."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.heartbeat import RENDEZVOUS
from paceline.launch.hang import RENDEZVOUS_TIMEOUT_S, STALE_S, Hang, WatchClock, WorkerState, find_hang

BOUND_S = 3.0


def waits(rank: int, inside_s: float = 5.0, collective: str = "all_reduce number 4") -> WorkerState:
    return WorkerState(rank=rank, pid=100 + rank, step=4, collective=collective, inside_s=inside_s, heartbeat_age_s=0.1)


def computes(rank: int) -> WorkerState:
    return WorkerState(rank=rank, pid=100 + rank, step=4, collective="all_reduce number 3", heartbeat_age_s=0.1)


def stopped(rank: int, stopped_s: float = 5.0) -> WorkerState:
    return dataclasses.replace(waits(rank), stopped_s=stopped_s, heartbeat_age_s=stopped_s)


def test_the_one_that_is_not_there_holds_up_the_others() -> None:
    assert find_hang([waits(0, 4.0), computes(1), waits(2, 5.0)], BOUND_S) == Hang("hung", (1,), (0, 2), 5.0)


def test_a_worker_stuck_outside_python_is_not_believed_to_wait() -> None:
    stuck = dataclasses.replace(waits(1), heartbeat_age_s=STALE_S + 0.1)
    assert find_hang([waits(0), stuck], BOUND_S) == Hang("hung", (1,), (0,), 5.0)


def test_nobody_waits_for_a_worker_that_computes_for_long() -> None:
    assert find_hang([computes(0), computes(1)], BOUND_S) is None


def test_one_that_has_just_come_ends_the_wait() -> None:
    assert find_hang([waits(0), waits(1, 0.1)], BOUND_S) is None


def test_all_wait_in_different_collectives() -> None:
    found = find_hang([waits(0, 4.0, "all_reduce"), waits(1, 5.0, "broadcast")], BOUND_S)
    assert found == Hang("mismatch", (0, 1), (0, 1), 5.0)


def test_a_stopped_worker_is_named_whether_or_not_somebody_waits() -> None:
    assert find_hang([stopped(0, 4.0), computes(1)], BOUND_S) == Hang("stopped", (0,), (), 4.0)
    assert find_hang([stopped(0, 1.0), waits(1)], BOUND_S) == Hang("stopped", (0,), (1,), 1.0)
    assert find_hang([stopped(0, 1.0), computes(1)], BOUND_S) is None


def test_a_slow_start_is_no_hang_but_one_without_end_is() -> None:
    def states(seconds: float) -> list[WorkerState]:
        return [waits(0, seconds, RENDEZVOUS), WorkerState(rank=1, pid=101)]

    assert find_hang(states(RENDEZVOUS_TIMEOUT_S - 1), BOUND_S) is None
    assert find_hang(states(RENDEZVOUS_TIMEOUT_S), BOUND_S) == Hang("hung", (1,), (0,), RENDEZVOUS_TIMEOUT_S)
    assert find_hang(states(RENDEZVOUS_TIMEOUT_S), 2 * RENDEZVOUS_TIMEOUT_S) is None


def test_no_worker_is_no_hang() -> None:
    assert find_hang([], BOUND_S) is None


def test_a_worker_whose_output_nobody_reads_is_not_to_blame() -> None:
    def writes(blocked_s: float) -> WorkerState:
        return dataclasses.replace(computes(1), output_blocked_s=blocked_s)

    assert find_hang([waits(0), writes(0.0)], BOUND_S) is None
    assert find_hang([waits(0), writes(BOUND_S - 0.1)], BOUND_S) is None
    assert find_hang([waits(0), writes(BOUND_S)], BOUND_S) == Hang("hung", (1,), (0,), 5.0)
    assert find_hang([waits(0), dataclasses.replace(waits(1), output_blocked_s=0.0)], BOUND_S) is not None


class Clock:
    """Looked at every second, except while everything is stopped."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.watch = WatchClock(10.0, lambda: self.time_s)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.time_s += 1.0
            self.watch.look()

    def pause(self, seconds: float) -> None:
        self.time_s += seconds
        self.watch.look()


def test_time_in_which_the_watcher_was_stopped_does_not_count() -> None:
    clock = Clock()
    clock.run(10)
    clock.pause(500.0)
    assert clock.watch.watched_s(505.0) == 6.0  # 5 s before the pause, and an interval in which a look was due
    clock.run(20)
    clock.pause(1000.0)
    clock.run(3)
    assert clock.watch.watched_s(3.0) == 3.0
    assert clock.watch.watched_s(23.0) == 3.0  # began within the second pause
    assert clock.watch.watched_s(1003.0 + 20.0) == 24.0
    assert clock.watch.watched_s(1003.0 + 20.0 + 500.0 + 5.0) == 30.0


def test_a_look_that_is_a_little_late_is_no_pause() -> None:
    clock = Clock()
    for _ in range(10):
        clock.pause(1.9)
    assert clock.watch.watched_s(19.0) == 19.0


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (waits(0), "in all_reduce number 4 for 5.0 s"),
        (computes(0), "in no collective; its last was all_reduce number 3"),
        (WorkerState(rank=0, pid=1), "in no collective so far"),
        (stopped(0), "stopped for 5.0 s"),
    ],
)
def test_what_a_worker_does_in_words(state: WorkerState, words: str) -> None:
    assert state.doing == words


seconds = st.floats(0, 10, allow_nan=False) | st.just(RENDEZVOUS_TIMEOUT_S + 1)
worker_states = st.lists(
    st.builds(
        WorkerState,
        rank=st.integers(0, 9),
        pid=st.integers(1, 9),
        collective=st.sampled_from(["", "all_reduce", "broadcast", RENDEZVOUS]),
        inside_s=st.none() | seconds,
        heartbeat_age_s=st.none() | seconds,
        stopped_s=st.none() | seconds,
    ),
    max_size=6,
    unique_by=lambda state: state.rank,
)
bounds = st.floats(0.1, 8, allow_nan=False)


def is_stuck(state: WorkerState) -> bool:
    return state.heartbeat_age_s is not None and state.heartbeat_age_s >= STALE_S


def is_waiting(state: WorkerState, bound_s: float) -> bool:
    patience_s = RENDEZVOUS_TIMEOUT_S if state.collective == RENDEZVOUS else 0.0
    lasts = state.inside_s is not None and state.inside_s >= max(bound_s, patience_s)
    return lasts and state.stopped_s is None and not is_stuck(state)


@given(worker_states, bounds)
def test_a_waiting_worker_is_never_blamed_when_somebody_does_not_wait(
    states: list[WorkerState], bound_s: float
) -> None:
    found = find_hang(states, bound_s)
    if found is None:
        return
    by_rank = {state.rank: state for state in states}
    assert found.culprits
    assert set(found.waiting) == {state.rank for state in states if is_waiting(state, bound_s)}
    if not all(is_waiting(state, bound_s) for state in states):
        assert not any(is_waiting(by_rank[rank], bound_s) for rank in found.culprits)
        assert found.kind != "mismatch"
    else:
        assert found.kind == "mismatch"


@given(worker_states, bounds)
def test_stopped_workers_come_first(states: list[WorkerState], bound_s: float) -> None:
    found = find_hang(states, bound_s)
    stopped_ranks = tuple(state.rank for state in states if state.stopped_s is not None)
    if found is not None and stopped_ranks:
        assert (found.kind, found.culprits) == ("stopped", stopped_ranks)
    if found is not None and found.kind == "stopped":
        assert stopped_ranks
    longest_s = max((state.stopped_s for state in states if state.stopped_s is not None), default=0.0)
    if longest_s >= bound_s:
        assert found is not None


@given(worker_states, bounds)
def test_nothing_is_said_below_the_bound(states: list[WorkerState], bound_s: float) -> None:
    short = [
        dataclasses.replace(
            state,
            inside_s=None if state.inside_s is None else min(state.inside_s, bound_s * 0.99),
            stopped_s=None if state.stopped_s is None else min(state.stopped_s, bound_s * 0.99),
        )
        for state in states
    ]
    assert find_hang(short, bound_s) is None


@given(worker_states, bounds)
def test_somebody_is_named_as_soon_as_one_waits_and_another_is_elsewhere(
    states: list[WorkerState], bound_s: float
) -> None:
    waiting = any(is_waiting(state, bound_s) for state in states)
    elsewhere = any(state.inside_s is None or state.stopped_s is not None for state in states)
    if waiting and elsewhere:
        assert find_hang(states, bound_s) is not None


@given(worker_states, bounds)
def test_the_order_of_the_workers_does_not_matter(states: list[WorkerState], bound_s: float) -> None:
    one, other = find_hang(states, bound_s), find_hang(states[::-1], bound_s)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.kind, set(one.culprits), set(one.waiting), one.seconds) == (
            other.kind,
            set(other.culprits),
            set(other.waiting),
            other.seconds,
        )
