from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.hardware.checks.gpu_facts import GpuFacts, GpusFacts
from paceline.hardware.checks.load_facts import CpuTimes, cpu_times, load_of
from paceline.measure.load import LoadMeter
from paceline.measure.steps import spread_of
from paceline.spec import MachineLoad


def test_times_are_those_of_the_cores_that_this_process_may_use(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu{core} 100 200 300 5000 60 7 8 50 0 0\ncpu99999 9 9 9 9 9 9 9 9 0 0\nctxt 1\n"
    )
    found = cpu_times(stat)
    assert found is not None
    per_s = os.sysconf("SC_CLK_TCK")
    assert (found.busy_s, found.stolen_s) == pytest.approx((600 / per_s, 50 / per_s))
    assert cpu_times(tmp_path / "missing") is None


def test_workers_on_the_same_cores_are_no_disturbance_to_each_other() -> None:
    def spent(own_s: float, busy_s: float, cores: tuple[int, ...] = (0, 1), host: str = "a") -> CpuTimes:
        return CpuTimes(host, cores, 10.0, own_s, busy_s, 1.0)

    load = load_of([spent(9.0, 19.0), spent(9.5, 19.0)])
    assert load is not None
    assert (load.num_cores, load.other_cores, load.stolen_cores) == pytest.approx((2, 0.05, 0.1))
    assert not load.is_disturbing
    assert load.sentence() == ""

    busy = load_of([spent(6.0, 20.0), spent(6.0, 20.0), spent(10.0, 10.0, host="b")])
    assert busy is not None
    assert busy.is_disturbing
    assert busy.sentence() == (
        "other programs used 0.9 of 2 cores during the measurement, 0.1 of them for other virtual machines"
    )
    pinned = load_of([spent(9.0, 10.0, (0,)), spent(9.0, 16.0, (1,))])
    assert pinned is not None
    assert (pinned.num_cores, pinned.other_cores) == pytest.approx((1, 0.7))
    assert load_of([]) is None


def test_a_slow_gpu_counts_if_a_worker_of_the_run_computes_on_it_whatever_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = GpusFacts(gpus=tuple(GpuFacts(index, throttle_reasons=0x20 * (index != 2)) for index in range(4)))
    monkeypatch.setattr("paceline.measure.load.collect_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    cool, hot = (LoadMeter(torch.device("cuda", ordinal)).spent() for ordinal in (0, 1))
    assert cool is not None
    assert cool.throttled == ""
    assert hot is not None
    assert hot.throttled == f"GPU 3 of {hot.host} ran slower than it could (it is too hot)"
    elsewhere = replace(hot, host="another node", cores=(99,), busy_s=0.0, own_s=0.0)
    load = load_of([cool, elsewhere])
    assert load is not None
    assert load.throttled == (hot.throttled,)


def test_a_gpu_that_is_too_hot_disturbs() -> None:
    assert MachineLoad(64, 0.1, 0.0, ("GPU 0 ran slower than it could (it is too hot)",)).is_disturbing


def test_the_spread_of_times_ignores_an_outlier() -> None:
    assert spread_of([1.0, 1.0]) == 0.0
    assert spread_of([1.0] * 9 + [50.0]) == 0.0
    assert spread_of([0.9, 0.95, 1.0, 1.05, 1.1]) == pytest.approx(0.074, abs=0.002)
