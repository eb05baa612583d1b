"""A probe measures a job on the workers that will train it and says what it could not measure; a plan needs no more."""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import ClusterError, JobError, PacelineError
from paceline.measure.load import CpuTimes, LoadMeter, load_of
from paceline.measure.steps import spread_of
from paceline.spec import Cluster, ForecastCheck, JobTiming, MicroBatchTiming
from tests.unit.hardware.fake_nvml import FakeNvml

OTHER = JobTiming("other", "a device", 10, 1, (MicroBatchTiming(1, 1.0),))


@pytest.mark.budget(processor_s=15)
def test_a_probe_of_two_workers_is_all_that_a_plan_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the file already, of another job and of checked forecasts, stays there."""
    monkeypatch.chdir(tmp_path)
    before = Cluster((), timings=(OTHER,), checks=(ForecastCheck("digits-lenet", 2, 110.0, 100.0),))
    before.save(tmp_path / "cluster.json")
    found = paceline.probe("digits-lenet", workers=2, budget=1.0)
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert cluster.checks == before.checks and {timing.job for timing in cluster.timings} == {"other", "digits-lenet"}
    timing = found.timing
    assert timing is not None and timing in cluster.timings
    assert timing.num_parameters == 129_068  # of LeNet for images of 8 x 8
    assert (timing.workers_together, timing.workers_together_on_node) in ((2, 2), (1, 1))
    assert all(one.seconds > 0 for one in timing.micro_batches) and timing.micro_batches
    assert timing.num_samples is not None and timing.num_samples > 1000
    assert all(sentence for sentence in found.not_measured)
    planned = paceline.plan("digits-lenet", devices="1..4", link_rate=1e9).forecast
    assert [row.devices for row in planned.rows] == [1, 2, 3, 4]
    assert all(0 < row.low_s < row.step_s < row.high_s for row in planned.rows)
    assert "10 %" in planned.past_error
    assert not list((tmp_path / "runs").glob("*"))  # what workers left for each other is gone


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": -1.0}, JobError, ["budget"]),
        ({"budget": math.nan}, JobError, ["budget"]),
        ({"workers": 0}, JobError, ["workers"]),
        ({"threads": -1}, JobError, ["threads"]),
        ({"out": "nowhere/cluster.json"}, ClusterError, ["nowhere/cluster.json"]),
        ({"out": "damaged.json"}, ClusterError, ["damaged.json"]),
    ],
)
def test_a_probe_that_cannot_be_written_is_refused_before_it_measures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, object],
    error: type[Exception],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(error) as caught:
        paceline.probe("digits-lenet", **arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.xfail(
    strict=True, reason="a budget of 0 is refused by a worker, after links were measured, by a name of a temporary file"
)
def test_a_budget_of_nothing_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacelineError) as caught:
        paceline.probe("digits-lenet", budget=0.0)
    assert "budget" in str(caught.value) and "request.json" not in str(caught.value)


@given(st.floats(0.01, 0.3), st.integers(0, 100))
def test_the_spread_of_times_is_that_of_their_logarithms_whatever_outliers_say(sigma: float, seed: int) -> None:
    draw = random.Random(seed)
    times_s = [math.exp(draw.gauss(0, sigma)) for _ in range(400)]
    assert spread_of(times_s) == pytest.approx(sigma, rel=0.25)
    assert spread_of([*times_s, *[1000.0] * 4]) == pytest.approx(sigma, rel=0.3)


@pytest.mark.parametrize("times_s", [[1.0], [1.0, 9.0], [1.0] * 9 + [50.0], [0.0, 0.0, 0.0, 1.0]])
def test_few_or_equal_times_have_no_spread(times_s: list[float]) -> None:
    assert spread_of(times_s) == 0.0


def test_a_slow_gpu_is_named_only_by_the_worker_that_computes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hot_gpu = {"nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x20 * (gpu == 3)}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(4, hot_gpu))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    cool, hot = (LoadMeter(torch.device("cuda", ordinal)).load() for ordinal in (0, 1))
    assert cool is not None and cool.throttled == ()
    assert hot is not None and hot.is_disturbing
    assert "GPU 3" in hot.throttled[0] and "too hot" in hot.throttled[0]


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_the_load_of_others_is_what_all_did_less_what_we_did(busy: int, own: int, stolen: int) -> None:
    one = CpuTimes("a", (0, 1), 10.0, own / 2, own + busy / 100, stolen / 100)
    load = load_of([one, one])  # two workers on the same cores see each other
    assert load is not None and load.num_cores == 2
    assert (load.other_cores, load.stolen_cores) == pytest.approx((busy / 1000, stolen / 1000))


def test_the_most_disturbed_node_counts_and_a_slow_gpu_of_any() -> None:
    quiet = CpuTimes("a", (0, 1), 10.0, 1.0, 1.0, 0.0, throttled="GPU 3 of a is too hot")
    load = load_of([quiet, CpuTimes("b", (0,), 10.0, 1.0, 7.0, 0.0)])
    assert load is not None
    assert (load.num_cores, load.other_cores, load.throttled) == (1, 0.6, ("GPU 3 of a is too hot",))
    assert load_of([]) is None


def test_a_meter_sees_what_this_process_does() -> None:
    meter = LoadMeter(torch.device("cpu"))
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    spent = meter.spent()
    assert spent.own_s >= 0.19 and spent.busy_s >= 0.15 and spent.elapsed_s >= 0.19
