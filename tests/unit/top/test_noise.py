"""The gradient noise scale by McCandlish et al. 2018: unbiased estimates, their average, and what a batch is worth."""

from __future__ import annotations

import csv
import math
import os
from contextlib import nullcontext
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.parallel.layout import squared_norm
from paceline.plan.forecast import statistical_efficiency
from paceline.train.meters import NoiseScale, SmoothedNoise
from tests.kit import losses
from tests.kit.engines import ENGINES, Engine
from tests.kit.oracle import add_gradients
from tests.kit.step_costs import Operators, loss_fn
from tests.kit.train import init, prepare
from tests.kit.workers import run_ranks
from tests.law.tasks import TASKS

positive = st.floats(1e-3, 1e6)
batches = st.integers(1, 2**20)


@given(positive, positive, st.lists(st.integers(1, 10_000), min_size=2, max_size=9))
def test_expected_norms_of_the_parts_of_a_batch_give_back_signal_and_noise(
    sqr: float, var: float, sizes: list[int]
) -> None:
    """E|G_B|^2 = |G|^2 + tr(Sigma) / B, of parts of any sizes, and of all of it."""
    large, factor = sum(sizes), len(sizes)
    small_sqr = sum(size / large * (sqr + var / size) for size in sizes)
    found = NoiseScale.from_norms(small_sqr, large / factor, sqr + var / large, large)
    # What rounding costs where one of the two is hardly there.
    assert found.grad_sqr == pytest.approx(sqr, abs=1e-12 * small_sqr * factor / (factor - 1))
    assert found.grad_var == pytest.approx(var, abs=1e-12 * small_sqr * large / (factor - 1))


@pytest.mark.parametrize(
    ("sqr", "var", "samples"),
    [(2.0, 6.0, 3.0), (0.0, 6.0, math.inf), (-1.0, 6.0, math.inf), (1.0, -1.0, 0.0), (-1.0, -1.0, 0.0)],
)
def test_estimates_out_of_range_are_all_noise_or_none(sqr: float, var: float, samples: float) -> None:
    assert NoiseScale(sqr, var).samples == samples


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 10)), min_size=1, max_size=30), st.floats(0, 0.999))
def test_smoothing_is_a_weighted_mean_of_both_parts(values: list[tuple[float, float]], decay: float) -> None:
    smoothed = SmoothedNoise(decay)
    assert smoothed.mean is None
    for sqr, var in values:
        smoothed = smoothed.after(NoiseScale(sqr, var))
    weights = np.array([decay ** (len(values) - 1 - place) for place in range(len(values))])
    expected = weights @ np.array(values) / weights.sum()
    assert smoothed.mean is not None
    assert [smoothed.mean.grad_sqr, smoothed.mean.grad_var] == pytest.approx(list(expected), abs=1e-9)


@pytest.mark.parametrize("broken", [NoiseScale(math.nan, 1.0), NoiseScale(1.0, math.inf)])
def test_a_measurement_after_an_overflow_is_left_out(broken: NoiseScale) -> None:
    once = SmoothedNoise(0.9).after(NoiseScale(1.0, 2.0))
    assert once.after(broken) == once


@pytest.mark.parametrize(
    ("batch", "noise", "base", "worth"),
    [
        (100, 100, 0, 0.5),  # B_noise: half of what a sample is worth in a small batch
        (25, 100, 0, 0.8),
        (300, 100, 100, 0.5),
        (400, 0, 100, 0.25),  # no noise: only the number of steps counts
        (10**9, math.inf, 0, 1.0),
        (64, 100, 64, 1.0),
    ],
)
def test_the_efficiency_of_a_batch_is_one_over_1_plus_b_over_b_noise(
    batch: float, noise: float, base: float, worth: float
) -> None:
    assert statistical_efficiency(batch, noise, base) == pytest.approx(worth)


@given(batches, batches, batches, positive)
def test_efficiencies_multiply_from_batch_to_batch_and_fall_with_it(
    one: int, two: int, three: int, noise: float
) -> None:
    small, middle, large = sorted((one, two, three))
    direct, onward = statistical_efficiency(large, noise, small), statistical_efficiency(large, noise, middle)
    assert direct == pytest.approx(statistical_efficiency(middle, noise, small) * onward)
    assert direct <= statistical_efficiency(middle, noise, small) * (1 + 1e-9) <= 1 + 1e-6
    # Twice the samples never make more than twice the progress, nor less than the same.
    gain = large / small * direct
    assert 1 - 1e-9 <= gain <= large / small * (1 + 1e-9)


# --- the runs that Pollux (Qiao et al., OSDI 2021) has published, one at each global batch size ---

DATA = os.environ.get("PACELINE_TEST_DATA")


def steps_and_noise(path: Path, base: int) -> tuple[list[float], list[float], list[float]]:
    """Progress in steps of the base batch, the run's own steps, and noise scales in samples, at the ends of epochs."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    noise = [base * row["grad_var"] / row["grad_sqr"] for row in rows]
    return [row["progress"] for row in rows], [row["iteration"] + 1 for row in rows], noise


@pytest.mark.skipif(DATA is None, reason="needs PACELINE_TEST_DATA")
@pytest.mark.parametrize("model", ["cifar10", "imagenet"])
def test_the_noise_scale_at_one_batch_forecasts_the_steps_at_the_others(model: str) -> None:
    """Nothing is fitted. Measured at the middle one of the batch sizes or a larger one, all others are within 15 %."""
    paths = {
        int(path.stem.rsplit("-", 1)[1]): path for path in (Path(DATA or "") / "pollux").glob(f"{model}-validation-*")
    }
    sizes = sorted(paths)
    assert len(sizes) >= 6
    runs = {size: steps_and_noise(paths[size], sizes[0]) for size in sizes}
    for measured in sizes[len(sizes) // 2 :]:
        progress, _, noise = runs[measured]
        for other in sizes:
            # A step of k times the samples is worth k x efficiency steps of the base batch.
            gains = [other / sizes[0] * statistical_efficiency(other, scale, sizes[0]) for scale in noise]
            intervals = zip(pairwise([0.0, *progress]), gains, strict=True)
            forecast = sum((end - begin) / gain for (begin, end), gain in intervals)
            reached = np.interp(min(progress[-1], runs[other][0][-1]), [0.0, *runs[other][0]], [0.0, *runs[other][1]])
            assert abs(forecast / reached - 1) < 0.15, (measured, other)


ONE_STEP = TASKS["evaluation"]
"""Of eight samples in four virtual shards."""


def _noise_of_a_step(engine: Engine) -> NoiseScale | None:
    with init(engine, ONE_STEP) as run:
        prepare(run, engine, ONE_STEP)
        for batch in run.batches(ONE_STEP.data, sampler=lambda _seed, _epoch: range(8)):
            run.step(batch, losses.classes)
        return run.noise.mean


def _squared_gradient(samples: list[int]) -> float:
    model = ONE_STEP.model().double()
    add_gradients(ONE_STEP, model, samples, epoch=0, step=0, num_shards=1)
    return sum(float(parameter.grad.square().sum()) for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        ("one worker", [[0]]),  # of a replica the first pass, in which every worker has its first shard
        ("dp on 3", [[0], [1], [2]]),
        ("fsdp", [[0, 2]]),
        ("hsdp", [[0, 1], [2, 3]]),
        ("fsdp x tp", [[0, 2]]),
        ("dp, bitwise", [[0], [1], [2], [3]]),  # every shard, on any number of workers
        ("fsdp, bitwise", [[0], [1], [2], [3]]),
        ("zero1", []),
    ],
)
def test_the_noise_scale_is_that_of_parts_of_the_batch_beside_all_of_it(engine: str, parts: list[list[int]]) -> None:
    expected = None
    if parts:
        small = [_squared_gradient([2 * shard + number for shard in part for number in (0, 1)]) for part in parts]
        one = NoiseScale.from_norms(sum(small) / len(small), 2 * len(parts[0]), _squared_gradient([*range(8)]), 8)
        expected = pytest.approx(astuple(one), rel=1e-9)
    for found in run_ranks(_noise_of_a_step, ENGINES[engine].num_workers, ENGINES[engine]):
        assert (found and astuple(found)) == expected


def test_a_norm_copies_no_gradient_however_it_lies_in_memory() -> None:
    gradient = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    with Operators() as operators:
        square = squared_norm([gradient], torch.zeros(()))
    assert float(square) == pytest.approx(float(gradient.square().sum()))
    assert not [one for one in operators.found if "clone" in one or "copy" in one]


def test_a_step_computes_the_norm_of_its_gradient_once() -> None:
    """For the noise scale, and to see whether the step is finite."""
    operators, data = Operators(), TensorDataset(torch.randn(48, 3), torch.randint(2, (48,)))
    with paceline.init(global_batch_size=8, virtual_shards=2, progress=False) as run:
        model = nn.Linear(3, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(run.batches(data)):
            with operators if number == 4 else nullcontext():  # a step that measures noise
                run.step(batch, loss_fn)
    norms = [number for name, number in operators.found.items() if "_foreach_norm" in name]
    assert norms == [1], operators.found
    assert operators.found["aten.dot.default"], "no noise was measured in this step"
