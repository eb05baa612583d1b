"""Workers that hold the others up."""

from __future__ import annotations

from paceline.spec import Plan
from paceline.spec.plan import NodePlacement
from paceline.train.session import WINDOW_STEPS, Stragglers


def sentences_of(*own_times_s: float, num_steps: int = 4 * WINDOW_STEPS) -> list[str]:
    stragglers = Stragglers(Plan(len(own_times_s), nodes=(NodePlacement("gpu1", len(own_times_s)),)))
    return [told for step in range(1, num_steps + 1) for told in stragglers.found(own_times_s, step)]


def test_a_worker_that_takes_much_longer_than_the_others_is_told_of_once() -> None:
    (told,) = sentences_of(0.1, 0.1, 0.2)
    assert told.startswith("Worker 2 on gpu1 holds the others up since about step 1: ")
    assert "200 ms, 2.0 times the median" in told


def test_equal_workers_single_ones_and_those_of_unknown_times_are_not_told_of() -> None:
    assert sentences_of(0.1, 0.12) == sentences_of(0.1) == sentences_of(0.1, 0.0) == []
    assert sentences_of(0.1, 0.2, num_steps=WINDOW_STEPS - 1) == []
