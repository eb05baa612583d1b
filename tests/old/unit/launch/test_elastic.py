"""What a failure means for the next start, without starting anything."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.elastic import RestartHistory, describe_end
from paceline.launch.failures import Ending, Failure
from paceline.launch.fleet import Fleet, WorkerSlot, slots
from paceline.launch.hang import Hang, WorkerState
from paceline.launch.supervise import NodeLoss, Outcome
from paceline.spec import Cluster, Device, Node, NodePlacement, Plan
from paceline.spec.cluster import DeviceKind

NOWHERE = Path("/nowhere")
STOPPED_AT = 10.0
PLAN = Plan(world_size=3, nodes=(NodePlacement("a", 2), NodePlacement("b", 1)))
LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:18315"

failures = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=30)


def slot(number: int) -> WorkerSlot:
    return WorkerSlot("", number)


@given(failures)
def test_a_place_is_left_out_when_it_fails_twice_without_progress_in_between(ends: list[tuple[int, int]]) -> None:
    history = RestartHistory()
    since: list[int] = []
    furthest = 0
    for step, culprit in ends:
        has_progressed = step > furthest
        furthest = max(furthest, step)
        since = [culprit] if has_progressed else [*since, culprit]
        history, left_out = history.after(step, [slot(culprit)])
        assert left_out == ({slot(culprit)} if since.count(culprit) > 1 else set())
        assert (history.furthest, history.num_without_progress) == (furthest, len(since))
        if left_out:  # who uses it again begins anew
            since = [one if one != culprit else -1 for one in since]


def test_one_failure_may_have_several_culprits() -> None:
    history, left_out = RestartHistory().after(5, [slot(0), slot(1)])
    assert left_out == frozenset()
    history, left_out = history.after(5, [slot(1), slot(2)])
    assert left_out == {slot(1)}
    assert history.after(6, [slot(0)]) == (RestartHistory(6, 1, frozenset({slot(0)})), frozenset())


def test_an_end_that_was_no_failure_counts_as_progress_if_it_was_some() -> None:
    history, _ = RestartHistory().after(5, [slot(1)])
    assert history.reached(5) == history
    assert history.reached(6) == RestartHistory(6)


def test_the_place_of_a_rank() -> None:
    assert slots(PLAN) == [WorkerSlot("a", 0), WorkerSlot("a", 1), WorkerSlot("b", 0)]
    assert slots(Plan(world_size=2, nodes=(NodePlacement("a", 2, devices=(3, 0)),))) == [
        WorkerSlot("a", 3),
        WorkerSlot("a", 0),
    ]
    assert slots(Plan(world_size=2)) == [WorkerSlot("", 0), WorkerSlot("", 1)]


def ending(rank: int, exit_code: int, time: float = 5.0, type: str = "", message: str = "boom") -> Ending:
    note = Failure(rank, 100 + rank, time, type, message, f"Traceback\n{type}: {message}\n") if type else None
    if note is not None and type == "DataError":
        note = replace(note, is_user_error=True)
    return Ending(rank, 100 + rank, exit_code, time, note, step=4 + rank, hostname="b" if rank == 2 else "a")


def killed(rank: int) -> Ending:
    return ending(rank, -signal.SIGKILL, STOPPED_AT + 0.1)


def died(*endings: Ending, **values: object) -> Outcome:
    return replace(Outcome(endings, STOPPED_AT), **values)  # type: ignore[arg-type]


BY_CAUSE: dict[str, tuple[Outcome, str, str, list[int]]] = {
    # name: the end, its kind, its words, the ranks whose places are to blame
    "killed": (died(ending(2, -9), killed(0), killed(1)), "failed", "worker 2 on b was killed at step 6", [2]),
    "crashed": (
        died(ending(1, -11), killed(0), killed(2)),
        "failed",
        "worker 1 on a crashed (SIGSEGV) at step 6",
        [1],
    ),
    "memory": (
        died(replace(ending(1, -9), out_of_memory=True), killed(0), killed(2)),
        "failed",
        "worker 1 on a ran out of memory at step 6",
        [1],
    ),
    "left": (
        died(ending(0, 3), killed(1), killed(2)),
        "failed",
        "worker 0 on a left with exit code 3 at step 6",
        [0],
    ),
    "all left alike": (
        died(*(ending(rank, 3) for rank in range(3))),
        "fatal",
        "worker 0 on a left with exit code 3 at step 6",
        [0],
    ),
    "all were asked to leave": (
        died(*(ending(rank, 143) for rank in range(3))),
        "failed",
        "worker 0 on a left with exit code 143 at step 6",
        [],
    ),
    "one raised": (
        died(ending(1, 1, type="ValueError"), ending(0, 1, type="RuntimeError", message=LOST), killed(2)),
        "failed",
        "worker 1 on a raised an error (ValueError: boom) at step 6",
        [1],
    ),
    "all raised": (
        died(*(ending(rank, 1, type="ValueError") for rank in range(3))),
        "fatal",
        "worker 0 on a raised an error (ValueError: boom) at step 6",
        [0],
    ),
    "all raised, each its own": (
        died(*(ending(rank, 1, type=f"Error{rank}") for rank in range(3))),
        "failed",
        "worker 0 on a raised an error (Error0: boom) at step 6",
        [0],
    ),
    "a mistake": (died(ending(1, 2, type="DataError"), killed(0), killed(2)), "fatal", "boom", [1]),
    "lost touch": (
        died(*(ending(rank, 1, type="RuntimeError", message=LOST) for rank in range(3))),
        "failed",
        "worker 0 on a lost touch with the others at step 6",
        [],
    ),
    "hung": (
        died(killed(0), killed(1), killed(2), hang=Hang("hung", (1, 2), (0,), 3.0), hang_at=9.0),
        "failed",
        "workers 1, 2 on a hung at step 6",
        [1, 2],
    ),
    "stopped": (
        died(killed(0), killed(1), killed(2), hang=Hang("stopped", (2,), (0,), 3.0), hang_at=9.0),
        "failed",
        "worker 2 on b was stopped at step 6",
        [2],
    ),
    "mismatch": (
        died(killed(0), killed(1), killed(2), hang=Hang("mismatch", (0, 1, 2), (0, 1, 2), 3.0), hang_at=9.0),
        "failed",
        "the workers waited for each other at step 6",
        [],
    ),
    "silent": (
        died(killed(0), killed(1), losses=(NodeLoss("b", (2,), 9.0, 3.0),)),
        "failed",
        "node b was lost at step 6",
        [],
    ),
    "done": (Outcome(tuple(ending(rank, 0) for rank in range(3)), math.inf), "done", "done", []),
    "interrupted": (died(killed(0), signalled=signal.SIGTERM), "done", "ended by SIGTERM", []),
    "to grow": (
        died(*(ending(rank, 143, STOPPED_AT + 1) for rank in range(3)), ended_to_grow=True),
        "to grow",
        "there is room for more workers at step 6",
        [],
    ),
    "done when it should have grown": (
        died(*(ending(rank, 0, STOPPED_AT + 1) for rank in range(3)), ended_to_grow=True),
        "done",
        "done",
        [],
    ),
    "lost a node while it ended to grow": (
        died(
            ending(0, 143, STOPPED_AT + 1),
            ending(1, 143, STOPPED_AT + 1),
            ended_to_grow=True,
            losses=(NodeLoss("b", (2,), 11.0, None, was_stopping=True),),
        ),
        "to grow",
        "there is room for more workers at step 6",
        [],
    ),
}


@pytest.mark.parametrize("case", BY_CAUSE)
def test_what_an_end_means(case: str) -> None:
    outcome, kind, words, ranks = BY_CAUSE[case]
    if outcome.hang is not None or outcome.losses:
        outcome = replace(
            outcome,
            states=tuple(WorkerState(rank=rank, pid=100 + rank, hostname="aab"[rank], step=6) for rank in range(3)),
        )
    elif kind != "done" or outcome.ended_to_grow:
        outcome = replace(outcome, states=(WorkerState(rank=2, pid=102, step=6),))
    end = describe_end(outcome, PLAN, NOWHERE)
    assert (end.kind, end.why) == (kind, words)
    assert end.step == (6 if outcome.states else max((one.step for one in outcome.endings if one.step), default=None))
    assert list(end.culprits) == [slots(PLAN)[rank] for rank in ranks]
    if kind == "failed":
        assert end.report is not None and end.noticed_at == end.report.noticed_at


def node(kind: DeviceKind, hostname: str = "here", is_remote: bool = False) -> Node:
    devices = tuple(Device(kind, i, "a device", 2**30) for i in range(4))
    return Node(hostname, 8, 2**33, "a cpu", devices, is_remote=is_remote)


def test_a_place_that_is_left_out() -> None:
    fleet = Fleet(Cluster((node("cuda"),)))
    fleet.leave_out(slot(1))
    fleet.leave_out(slot(1))
    fleet.leave_out(WorkerSlot("unknown", 1))
    assert [device.index for device in fleet.cluster.devices] == [0, 2, 3]
    fleet = Fleet(Cluster((node("cpu"),)))
    fleet.leave_out(slot(1))
    assert fleet.num_slots == 3


def test_a_place_that_is_left_out_is_tried_again_after_pauses_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    fleet = Fleet(Cluster((node("cuda"),)))
    fleet.leave_out(slot(2), for_good=True)
    for pause_s in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        fleet.leave_out(slot(1))
        now += pause_s - 1
        assert (fleet.has_returned, fleet.take_back(), fleet.num_slots) == (False, [], 2)
        now += 1
        assert (fleet.has_returned, fleet.num_slots) == (True, 2)  # only a restart can use it
        assert fleet.take_back() == [] and [device.index for device in fleet.cluster.devices] == [0, 1, 3]


def test_a_node_without_a_place_is_no_part_of_the_cluster() -> None:
    fleet = Fleet(Cluster((node("cpu", "a", True), node("cpu", "b", True))))
    for number in range(4):
        fleet.leave_out(WorkerSlot("a", number))
    assert [one.hostname for one in fleet.cluster.nodes] == ["b"]


def test_devices_that_somebody_else_uses_are_no_places() -> None:
    busy = node("cuda")
    busy = replace(busy, devices=(replace(busy.devices[0], busy="90 % busy"), *busy.devices[1:]))
    assert Fleet(Cluster((busy,))).num_slots == 3
