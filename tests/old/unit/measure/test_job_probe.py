"""What the worker that is timed alone does when memory or time run out."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import env
from paceline.measure import job_probe
from paceline.measure.job_probe import FirstWorker, sizes_to_time
from paceline.measure.steps import StepTiming, Subject, is_enough
from paceline.measure.values import JobRequest
from paceline.measure.workers_together import Together
from paceline.spec import Job, MicroBatchTiming


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sizes_double_up_to_the_largest_and_meet_the_share(largest: int, share: int) -> None:
    sizes = sizes_to_time(largest, share)
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))
    assert (share in sizes) == (share <= largest)
    assert all(size in (largest, share) or size & (size - 1) == 0 for size in sizes)


@given(st.integers(0, 80), st.floats(0, 100), st.floats(-10, 100))
def test_passes_are_at_least_three_and_never_endless(num_passes: int, spent_s: float, budget_s: float) -> None:
    counted = num_passes - 2
    enough = is_enough([0.1] * num_passes, spent_s, budget_s)
    assert not enough if counted < 3 else enough or counted < 50


def test_of_passes_that_take_seconds_fewer_are_enough() -> None:
    assert not is_enough([9.0, 5.0], 14.0, 60.0)
    assert is_enough([9.0, 5.0, 5.0], 19.0, 60.0)
    assert not is_enough([9.0, 0.1, 0.1], 9.2, 60.0)  # the first one took its time once


class _Timer:
    """In place of real passes: a second a sample, and no memory for more than `most` samples."""

    def __init__(self, most: int, problem: Exception) -> None:
        self._most = most
        self._problem = problem

    def __call__(self, _subject: Subject, size: int, _left_s: float) -> MicroBatchTiming:
        if size > self._most:
            raise self._problem
        return MicroBatchTiming(size, float(size))


def _first(facts: env.WorkerFacts | None = None, **request: Any) -> FirstWorker:
    run: Any = SimpleNamespace(device=torch.device("cpu"))
    optimizer: Any = SimpleNamespace(zero_grad=lambda **_: None)
    subject = Subject(run, None, lambda *_: torch.zeros(()), optimizer)
    return FirstWorker(subject, JobRequest(Job(), "", **request), facts or env.WorkerFacts())


def _timed(monkeypatch: pytest.MonkeyPatch, timer: _Timer, budget_s: float) -> tuple[list[int], list[str]]:
    monkeypatch.setattr(job_probe, "_time_size", timer)
    first = _first(largest_micro_batch_size=20, budget_s=budget_s)
    timings, peaks = first.time_micro_batches()
    sizes = [timing.micro_batch_size for timing in timings]
    assert sizes == list(peaks)
    return sizes, first.not_measured


def test_doubling_ends_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.OutOfMemoryError("CUDA out of memory")
    assert _timed(monkeypatch, _Timer(7, out), 1e9) == ([1, 2, 4], ["micro-batches of 8 and more: out of memory"])
    assert _timed(monkeypatch, _Timer(0, out), 1e9) == ([], ["micro-batches of 1 and more: out of memory"])
    assert _timed(monkeypatch, _Timer(99, out), 1e9) == ([1, 2, 4, 8, 16, 20], [])


def test_doubling_ends_where_the_budget_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, reasons = _timed(monkeypatch, _Timer(99, ValueError()), 20.5)
    assert sizes == [1, 2, 4]
    assert reasons == ["micro-batches of 8 and more: at about 8 s a pass they exceed 20.5 s for all"]


def test_doubling_ends_before_the_kernel_would_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_probe, "_peak_bytes", lambda: 3 * 2.0**30)
    monkeypatch.setattr(job_probe, "free_bytes", lambda _device: 2 * 2.0**30)
    sizes, (reason,) = _timed(monkeypatch, _Timer(99, ValueError()), 1e9)
    assert sizes == [1]
    assert reason == "micro-batches of 2 and more: memory lacks about 1.0 GiB"


def test_other_errors_of_the_model_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        _timed(monkeypatch, _Timer(1, RuntimeError("a shape does not fit")), 1e9)
    with pytest.raises(ValueError, match="nonsense"):
        _timed(monkeypatch, _Timer(1, ValueError("nonsense")), 1e9)


def test_batch_norm_of_one_sample_is_left_out_and_the_rest_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(_Timer):
        def __call__(self, subject: Subject, size: int, left_s: float) -> MicroBatchTiming:
            if size == 1:
                raise ValueError("Expected more than 1 value per channel when training, got input size [1, 8, 1, 1]")
            return super().__call__(subject, size, left_s)

    sizes, (reason,) = _timed(monkeypatch, Normed(99, ValueError()), 1e9)
    assert sizes == [2, 4, 8, 16, 20]
    assert reason == "micro-batches of 1: the model's batch norm needs more samples"


def test_workers_together_have_to_fit_into_memory_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_probe, "free_bytes", lambda _device: 10 * 2.0**30)
    first = _first(env.WorkerFacts(world_size=4, local_world_size=4), workers_on_node=4, budget_s=60.0)
    alone = StepTiming(32, 0.5, 0.1)
    together = first.what_fits_together(alone, 3 * 2.0**30)
    assert together.micro_batch_size == 32
    assert 50 < together.budget_s <= 60
    assert first.not_measured == []
    assert first.what_fits_together(None, 0.0) == Together()
    assert first.not_measured == []
    assert first.what_fits_together(alone, 4 * 2.0**30) == Together()
    assert first.what_fits_together(StepTiming(32, 20.0, 5.0), 0.0) == Together()
    assert first.not_measured == [
        "4 workers at the same time: memory lacks about 2.0 GiB",
        "4 workers at the same time: at 25 s a step they exceed 60 s for all",
    ]


def test_a_step_is_timed_with_what_a_worker_among_all_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_probe, "time_steps", lambda _subject, size, _left_s, **_: StepTiming(size, 1.0, 1.0))
    first = _first(largest_micro_batch_size=64, micro_batch_size=20, budget_s=60.0)
    step = first.time_step([MicroBatchTiming(size, 0.1 * size) for size in (1, 8, 64)])
    assert step is not None
    assert step.micro_batch_size == 8
    assert first.time_step([MicroBatchTiming(8, 20.0)]) is None
    assert first.not_measured == ["the optimizer: at 20 s a pass it exceeds 60 s for all"]
    assert first.time_step([]) is None
    assert len(first.not_measured) == 1
