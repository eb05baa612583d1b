"""Which worker holds the others up: named once, with numbers, and named again when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.train.session.stragglers import SLOW, WINDOW_STEPS, Stragglers


def _sentences(windows: Sequence[Sequence[float]]) -> list[str]:
    """What is said of windows in each of which all steps of a worker take the same time."""
    watch = Stragglers([f"Worker {rank}" for rank in range(len(windows[0]))])
    steps = [times for times in windows for _ in range(WINDOW_STEPS)]
    return [sentence for step, times in enumerate(steps, start=1) for sentence in watch.note(step, times)]


def test_a_slow_worker_is_named_once_and_when_it_is_over() -> None:
    said = _sentences([(0.05, 0.05, 0.05), (0.05, 0.1, 0.05), (0.05, 0.1, 0.05), (0.05, 0.05, 0.05)])
    assert said == [
        "Worker 1 holds the others up since about step 51: its part of a step takes 100 ms, 2.0 times the median of "
        "the others.",
        "Worker 1 is as fast as the others again at step 200.",
    ]


def test_one_of_two_is_slow() -> None:
    assert _sentences([(0.2, 0.1)])[0].startswith("Worker 0 holds the others up since about step 1:")


def test_alone_nobody_is_slow() -> None:
    assert not _sentences([(0.1,), (0.9,)])


def test_one_slow_step_is_no_straggler() -> None:
    watch = Stragglers(["a", "b"])
    assert not [s for step in range(1, WINDOW_STEPS + 1) for s in watch.note(step, (0.1, 5.0 if step == 7 else 0.1))]


@given(st.lists(st.floats(1e-4, 10), min_size=2, max_size=6), st.floats(1.0, 0.99 * SLOW))
def test_equal_workers_are_never_named(times: list[float], spread: float) -> None:
    one = times[0]
    assert not _sentences([[one] * (len(times) - 1) + [one * spread]])


def test_who_is_slow_for_two_windows_may_be_left_out() -> None:
    watch = Stragglers(["a", "b", "c"])
    for step in range(1, 2 * WINDOW_STEPS + 1):
        watch.note(step, (0.1, 0.1, 0.25))
        assert watch.lasting(2.0) == ([2] if step == 2 * WINDOW_STEPS else [])
    assert watch.lasting(3.0) == []
