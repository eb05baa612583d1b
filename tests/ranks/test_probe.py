"""`paceline probe` with real processes, and what its worker does when memory or time run out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import env
from paceline.launch import run_workers
from paceline.measure import job_probe
from paceline.measure.job_probe import FirstWorker, sizes_to_time
from paceline.measure.link_probe import time_loopback, time_shared_memory
from paceline.measure.steps import StepTiming, Subject, is_enough
from paceline.measure.values import JobRequest, NetworkProbe, read_json
from paceline.measure.workers_together import Together
from paceline.spec import Cluster, Job, MicroBatchTiming, Plan
from tests.ranks.command_line import TRACEBACK, paceline, succeeded


@pytest.mark.parametrize("measure", [time_loopback, time_shared_memory])
def test_two_processes_tell_each_other_something(measure: Any) -> None:
    times = measure()
    # Slower than a disk of the nineties or faster than any memory would be a mistake in the arithmetic.
    assert 1e6 < times.bytes_per_s < 1e12
    assert 1e-8 < times.latency_s < 1


@pytest.mark.slow
def test_workers_time_what_they_send_each_other(tmp_path: Path) -> None:
    # The one between them looks on.
    request = {"hostnames": ["a", "b", "c"], "pairs": [[0, 2]], "num_streams": 2}
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(request))
    program = ["-m", "paceline.measure.network_probe", str(asked), str(tmp_path / "out")]
    run_workers(Plan(world_size=3), program, run_dir=tmp_path)
    (link,) = read_json(NetworkProbe, tmp_path / "out" / "network.json").links
    assert link.ends == ("a", "c")
    assert link.interface == (env.own_interface() or "lo")
    assert link.single_stream_bytes_per_s is not None
    assert 1e6 < link.single_stream_bytes_per_s <= link.bytes_per_s < 1e12
    assert 1e-8 < link.latency_s < 1


@pytest.mark.slow
def test_the_command_measures_a_recipe_and_its_file_loads_back(tmp_path: Path) -> None:
    options = ("--set", "global_batch_size=64", "--set", "parity=numeric", "-n", "2", "--budget", "60")
    shown = json.loads(succeeded(paceline("probe", "digits-lenet", *options, "--json", cwd=tmp_path)).stdout)
    cluster = Cluster.load(tmp_path / "cluster.json")
    (timing,) = cluster.timings
    assert shown["timing"]["micro_batches"][0]["seconds"] == timing.micro_batches[0].seconds
    sizes = [row.micro_batch_size for row in timing.micro_batches]
    # As far as one worker alone has to go, though two were asked for.
    assert sizes == [1, 2, 4, 8, 16, 32, 64][: len(sizes)]
    assert len(sizes) == 7 or "exceed 60 s for all" in shown["not_measured"][-1]  # this machine may be busy
    assert timing.largest_micro_batch_size == sizes[-1]
    seconds = [row.seconds for row in timing.micro_batches]
    assert min(seconds) > 0
    # More samples take longer in all, and less each.
    assert max(seconds[-2:]) > min(seconds[:2])
    assert sizes[-1] / seconds[-1] > 1 / seconds[0]
    assert timing.num_parameters == 129_068
    assert timing.threads_per_worker == 1
    assert timing.loader_samples_per_s is not None
    assert timing.loader_samples_per_s > 0
    assert timing.checkpoint_bytes_per_s is not None
    assert timing.checkpoint_bytes_per_s > 0
    assert timing.loads_between_passes
    assert timing.update_s is not None
    assert 0 < timing.update_s < max(seconds)
    assert (timing.workers_together, timing.workers_together_on_node) == (2, 2)
    # Neighbours cost something at most; on one core they would take twice as long.
    assert 0.5 < timing.together_slowdown < 4
    # What training would choose from, and no sum costs as much as seconds.
    assert [timed.algorithm for timed in timing.sums] == ["all_reduce", "hierarchical"]
    assert all(timed.wire == "float32" and 0 <= timed.waiting_s < 10 * max(seconds) for timed in timing.sums)
    assert list((tmp_path / "runs").iterdir()) == []

    # A second look, at the links alone, keeps what is known of the job.
    again = succeeded(paceline("probe", cwd=tmp_path))
    assert again.stdout.splitlines()[-1] == "cluster.json"
    assert Cluster.load(tmp_path / "cluster.json").timings == (timing,)


@pytest.mark.slow
def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "file").write_text("")
    for options, words in (
        (("--out", "broken.json"), "broken.json cannot be read as a cluster"),
        (("--folder", "file"), "The folder file cannot be used"),
        (("digits-lenett",), "did you mean 'digits-lenet'"),
        (("digits-lenet", "--set", "model=nosuch:model"), "nosuch"),
    ):
        result = paceline("probe", *options, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert words in result.stderr
        assert TRACEBACK not in result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["broken.json", "file", "runs"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_model_that_fails_leaves_its_report(tmp_path: Path) -> None:
    wrong = ("--set", "model=gpt", "--set", "model.options={vocab_size=9, context=9}")
    result = paceline("probe", "digits-lenet", *wrong, "--quiet", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert TRACEBACK in result.stderr
    (scratch,) = (tmp_path / "runs").iterdir()
    assert (scratch / "failures").is_dir()
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.slow
def test_a_worker_alone_has_no_neighbours_to_be_timed_with(tmp_path: Path) -> None:
    options = ("--set", "global_batch_size=8", "-n", "1", "--budget", "5", "--quiet")
    succeeded(paceline("probe", "digits-lenet", *options, cwd=tmp_path))
    (timing,) = Cluster.load(tmp_path / "cluster.json").timings
    assert (timing.workers_together, timing.workers_together_on_node, timing.together_slowdown) == (1, 1, 1.0)
    assert timing.sums == ()
    assert timing.update_s is not None


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
