"""Schedules: complete, free of deadlock, and as short and as small as their inventors say."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.parallel.pipeline.schedules import Action, make_schedule
from paceline.partition import half_passes_in_flight, in_flight_by_stage, micro_batches_in_flight
from paceline.spec.mesh import ScheduleName
from tests.old.unit.parallel.pipeline.simulation import simulate

HALVES = {"input": 1, "weight": -1}
UNIT_S = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")

names = st.sampled_from(NAMES)
workers = st.integers(1, 6)
micro_batches = st.integers(1, 13)
places = st.integers(1, 3)


def unit_s(action: Action) -> float:
    return UNIT_S[action.kind]


@settings(deadline=None)
@given(names, workers, micro_batches, places)
def test_every_action_is_done_once_by_its_worker_and_nobody_waits_for_ever(
    name: ScheduleName, num_workers: int, num_micro_batches: int, stages_per_worker: int
) -> None:
    schedule = make_schedule(name, num_workers, num_micro_batches, stages_per_worker)
    kinds = ("forward", "input", "weight") if name == "zero_bubble" else ("forward", "backward")
    num_stages = num_workers * stages_per_worker
    for worker, actions in enumerate(schedule):
        assert len(actions) == len(set(actions))
        assert {(a.kind, a.stage, a.micro_batch) for a in actions} == {
            (kind, stage, micro_batch)
            for kind in kinds
            for stage in range(worker, num_stages, num_workers)
            for micro_batch in range(num_micro_batches)
        }
    simulated = simulate(schedule, unit_s, hop_s=0.5)
    assert 0 <= simulated.bubble < 1
    assert simulated.makespan_s >= 3 * num_micro_batches * stages_per_worker


@settings(deadline=None)
@given(workers, micro_batches)
def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_left(num_workers: int, num_micro_batches: int) -> None:
    schedule = make_schedule("1f1b", num_workers, num_micro_batches)
    expected = tuple(min(num_workers - rank, num_micro_batches) for rank in range(num_workers))
    assert simulate(schedule, unit_s).most_kept == expected


@settings(deadline=None)
@given(names, workers, st.integers(1, 3), places)
def test_the_planner_knows_how_many_micro_batches_a_worker_keeps(
    name: ScheduleName, num_workers: int, rounds: int, stages_per_worker: int
) -> None:
    v = stages_per_worker if name in ("interleaved", "zero_bubble") else 1
    num_micro_batches = rounds * num_workers
    kept = simulate(make_schedule(name, num_workers, num_micro_batches, v), unit_s).most_kept
    expected = [v * micro_batches_in_flight(num_workers, r, num_micro_batches, name, v) for r in range(num_workers)]
    if name == "zero_bubble":  # the later workers need not use all that they may
        assert all(own <= most + 1e-9 for own, most in zip(kept, expected, strict=True))
        assert kept[0] == pytest.approx(expected[0])
    else:
        assert kept == pytest.approx(expected)


@settings(deadline=None)
@given(workers, st.integers(1, 5), st.lists(st.floats(0, 10), min_size=1, max_size=3))
def test_stages_of_a_worker_keep_no_more_than_the_planner_knows(
    num_workers: int, rounds: int, stage_bytes: list[float]
) -> None:
    """Whatever a micro-batch takes in each of its stages, and in whichever backward begins."""
    num_micro_batches, num_places = rounds * num_workers, len(stage_bytes)
    schedule = make_schedule("interleaved", num_workers, num_micro_batches, num_places)
    for worker, actions in enumerate(schedule):
        kept, most, known = [0] * num_places, [0.0] * num_places, [0.0] * num_places
        most_at_once = 0
        for action in actions:
            place = action.stage // num_workers
            if action.kind == "backward":
                most[place] = max(most[place], sum(map(mul, kept, stage_bytes)))
                most_at_once = max(most_at_once, sum(kept))
            kept[place] += {"forward": 1, "backward": -1}[action.kind]
        moments = in_flight_by_stage(num_workers, worker, num_micro_batches, "interleaved", num_places)
        for one in moments:
            known[one.place] = max(known[one.place], sum(map(mul, one.micro_batches, stage_bytes)))
        assert all(own <= limit + 1e-9 for own, limit in zip(most, known, strict=True))
        assert most_at_once == max(sum(one.micro_batches) for one in moments)


@settings(deadline=None)
@given(workers, micro_batches)
def test_zero_bubble_keeps_no_more_than_1f1b_at_its_worst(num_workers: int, num_micro_batches: int) -> None:
    schedule = make_schedule("zero_bubble", num_workers, num_micro_batches)
    assert max(simulate(schedule, unit_s).most_kept) <= num_workers


@pytest.mark.parametrize(("num_workers", "num_micro_batches"), [(2, 4), (4, 8), (4, 12), (8, 32)])
def test_bubbles_are_those_of_the_papers(num_workers: int, num_micro_batches: int) -> None:
    def bubble_s(name: ScheduleName, stages_per_worker: int = 1) -> float:
        schedule = make_schedule(name, num_workers, num_micro_batches, stages_per_worker)
        makespan_s = simulate(schedule, lambda action: unit_s(action) / stages_per_worker).makespan_s
        return makespan_s - 3 * num_micro_batches

    assert bubble_s("gpipe") == pytest.approx(3 * (num_workers - 1))
    assert bubble_s("1f1b") == pytest.approx(3 * (num_workers - 1))
    assert bubble_s("interleaved", 2) == pytest.approx(3 * (num_workers - 1) / 2)
    assert bubble_s("interleaved", 4) == pytest.approx(3 * (num_workers - 1) / 4)
    # ZB-H1: (p - 1)(forward + input - weight).
    assert bubble_s("zero_bubble") == pytest.approx(num_workers - 1)


def test_workers_that_wait_for_each_other_are_told() -> None:
    first = (Action("backward", 0, 0), Action("forward", 0, 0))
    second = (Action("forward", 1, 0), Action("backward", 1, 0))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate((first, second), unit_s)


@settings(deadline=None)
@given(workers, st.integers(1, 3), places)
def test_no_worker_has_more_halves_of_backward_passes_than_is_planned(
    num_workers: int, rounds: int, stages_per_worker: int
) -> None:
    num_micro_batches = rounds * num_workers
    schedule = make_schedule("zero_bubble", num_workers, num_micro_batches, stages_per_worker)
    for worker, actions in enumerate(schedule):
        # The first stage has no halves: all of its backward pass is put off.
        changes = (HALVES.get(action.kind, 0) for action in actions if action.stage)
        planned = half_passes_in_flight(num_workers, worker, num_micro_batches, "zero_bubble", stages_per_worker)
        assert max(accumulate(changes), default=0) <= stages_per_worker * planned + 1e-9
    assert half_passes_in_flight(num_workers, num_workers - 1, num_micro_batches, "1f1b") == 0
