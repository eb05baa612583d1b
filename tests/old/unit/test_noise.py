"""Laws of statistical efficiency, and the noise scale of published training runs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.noise import (
    NoiseScale,
    SmoothedNoise,
    efficiency,
    lr_gain,
)
from tests.old.unit.pollux_runs import (
    Run,
    errors,
    from_two,
    largest_spread,
    noise_scale_of_gain,
    read_runs,
    steps_to_progress,
    without_clipping,
)

positive = st.floats(1e-3, 1e6)
batches = st.integers(1, 2**20)


@given(positive, positive, st.floats(1, 1e4), st.floats(1.01, 100))
def test_expected_norms_give_back_signal_and_noise(sqr: float, var: float, small: float, factor: float) -> None:
    large = small * factor
    found = NoiseScale.from_norms(sqr + var / small, small, sqr + var / large, large)
    # What rounding costs where one of the two is hardly there.
    size = sqr + var / small
    assert found.grad_sqr == pytest.approx(sqr, abs=1e-12 * size * factor / (factor - 1))
    assert found.grad_var == pytest.approx(var, abs=1e-12 * size * large / (factor - 1))


def test_the_estimators_are_unbiased() -> None:
    """Gradients drawn from a known distribution, in parts of unequal size that make up the large batch."""
    draw = np.random.default_rng(0)
    mean, spread = draw.normal(size=20) / 4, draw.uniform(0.2, 2.0, 20)
    sizes = np.array([5, 4, 4])
    estimates = []
    for _ in range(4000):
        parts = [draw.normal(mean, spread, (size, 20)).mean(0) for size in sizes]
        weights = sizes / sizes.sum()
        small_sqr = sum(weight * part @ part for weight, part in zip(weights, parts, strict=True))
        whole = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        one = NoiseScale.from_norms(small_sqr, sizes.sum() / len(sizes), whole @ whole, sizes.sum())
        estimates.append((one.grad_sqr, one.grad_var))
    found, error = np.mean(estimates, 0), np.std(estimates, 0) / math.sqrt(len(estimates))
    truth = np.array([mean @ mean, spread @ spread])
    assert (error < 0.03 * truth).all()
    assert (abs(found - truth) < 4 * error).all()


def test_the_same_batch_twice_says_nothing() -> None:
    with pytest.raises(ValueError, match="not smaller"):
        NoiseScale.from_norms(1.0, 8, 1.0, 8)


@pytest.mark.parametrize(
    ("sqr", "var", "samples"), [(2.0, 6.0, 3.0), (0.0, 6.0, math.inf), (-1.0, 6.0, math.inf), (1.0, -1.0, 0.0)]
)
def test_estimates_out_of_range(sqr: float, var: float, samples: float) -> None:
    assert NoiseScale(sqr, var).samples == samples


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 10)), min_size=1, max_size=30), st.floats(0, 0.999))
def test_smoothing_is_a_weighted_mean(values: list[tuple[float, float]], decay: float) -> None:
    smoothed = SmoothedNoise(decay)
    for sqr, var in values:
        smoothed = smoothed.after(NoiseScale(sqr, var))
    weights = np.array([decay ** (len(values) - 1 - place) for place in range(len(values))])
    expected = weights @ np.array(values) / weights.sum()
    assert smoothed.mean is not None
    assert [smoothed.mean.grad_sqr, smoothed.mean.grad_var] == pytest.approx(list(expected), abs=1e-9)


@given(batches, batches, positive)
def test_gains(one: int, other: int, noise: float) -> None:
    """1 <= AdaScale's gain <= linear; all signal gives 1, all noise gives the linear rule."""
    base, batch = sorted((one, other))
    gain = lr_gain("adascale", batch, base, noise)
    linear = lr_gain("linear", batch, base)
    assert 1 - 1e-9 <= gain <= linear * (1 + 1e-9)
    assert lr_gain("adascale", batch, base, math.inf) == linear
    assert lr_gain("adascale", batch, base, 1e-9) == pytest.approx(1.0, rel=1e-6)
    assert lr_gain("sqrt", batch, base) == pytest.approx(math.sqrt(linear))
    assert lr_gain("none", batch, base) == 1.0
    # As Johnson et al. 2020 write it.
    var, sqr = noise / base, 1.0
    assert gain == pytest.approx((var + sqr) / (var / linear + sqr), rel=1e-9)


def test_adascale_needs_a_noise_scale() -> None:
    with pytest.raises(JobError, match="noise scale"):
        lr_gain("adascale", 512, 128)


@given(st.lists(st.tuples(st.floats(1, 100), positive), min_size=1, max_size=20), batches)
def test_progress_at_the_base_batch_is_steps(intervals: list[tuple[float, float]], base: int) -> None:
    progress = list(np.cumsum([length for length, _ in intervals]))
    noise = [scale for _, scale in intervals]
    assert steps_to_progress(progress, noise, base, base) == pytest.approx(progress)
    # One noise scale throughout: S(B) of the module's docstring.
    ratio = steps_to_progress(progress, [noise[0]] * len(noise), 4 * base, base)[-1] / progress[-1]
    assert ratio == pytest.approx((1 + noise[0] / (4 * base)) / (1 + noise[0] / base))


def test_efficiency_is_relative_to_a_base() -> None:
    assert efficiency(100, 100) == 0.5
    assert efficiency(300, 100, base_batch_size=100) == 0.5
    assert efficiency(10**9, math.inf) == 1.0


@given(batches, st.integers(2, 1000), positive)
def test_the_noise_scale_of_a_gain_is_that_it_came_from(base: int, factor: int, noise: float) -> None:
    gain = lr_gain("adascale", factor * base, base, noise)
    # What rounding costs where the gain is nearly 1 or nearly linear.
    assert noise_scale_of_gain(gain, factor * base, base) == pytest.approx(
        noise, abs=1e-12 * (base + noise) * (1 + noise / (factor * base)) * factor
    )


def test_gains_that_counting_alone_can_lead_to() -> None:
    assert noise_scale_of_gain(0.9, 512, 128) == noise_scale_of_gain(1.0, 512, 128) == 0
    assert noise_scale_of_gain(4.0, 512, 128) == noise_scale_of_gain(4.1, 512, 128) == math.inf
    with pytest.raises(ValueError, match="not larger"):
        noise_scale_of_gain(1.0, 128, 128)


@given(
    st.lists(st.tuples(st.floats(1, 100), positive), min_size=2, max_size=20), st.integers(2, 500), st.integers(1, 500)
)
def test_the_gain_over_a_whole_interval_is_right_at_any_other_batch(
    parts: list[tuple[float, float]], measured: int, other: int
) -> None:
    """However the noise scale changes within it; a value of the end would be wrong."""
    base = 8
    progress, noise = list(np.cumsum([length for length, _ in parts])), [scale for _, scale in parts]
    steps = steps_to_progress(progress, noise, measured * base, base)[-1]
    mean = noise_scale_of_gain(progress[-1] / steps, measured * base, base)
    truth = steps_to_progress(progress, noise, other * base, base)[-1]
    assert steps_to_progress(progress[-1:], [mean], other * base, base)[-1] == pytest.approx(truth, rel=1e-6)


# --- Training runs of the public artifact of Pollux: `pollux_runs` says what they are.

_DATA = os.environ.get("PACELINE_TEST_DATA")
needs_runs = pytest.mark.skipif(_DATA is None, reason="PACELINE_TEST_DATA names no folder with pollux/")


def _runs(model: str) -> dict[int, Run]:
    assert _DATA is not None
    return read_runs(Path(_DATA) / "pollux", model)


@needs_runs
@pytest.mark.parametrize("model", ["cifar10", "imagenet"])
def test_steps_at_other_batch_sizes_from_the_noise_scale_at_one(model: str) -> None:
    """Nothing is fitted. Measured at the middle one of the batch sizes or at any larger, all others are within 15 %."""
    runs = _runs(model)
    sizes = list(runs)
    assert len(sizes) >= 6
    for measured in sizes[len(sizes) // 2 :]:
        for other in sizes:
            end = errors(runs[measured], runs[measured].recorded, runs[other])[-1]
            assert abs(end) < 0.15, (measured, other)
    # It does grow during training, or one number would do.
    largest = runs[sizes[-1]]
    assert largest.recorded[-1] > 20 * largest.recorded[1]
    # And the formula matters: without it, a batch k times as large would take 1/k of the steps.
    linear = runs[sizes[0]].steps[-1] * sizes[0] / sizes[-1]
    assert abs(linear / largest.steps[-1] - 1) > 0.15


@needs_runs
@pytest.mark.parametrize(("model", "smallest"), [("cifar10", 1024), ("imagenet", 3200)])
def test_counted_progress_gives_the_steps_all_along_the_way(model: str, smallest: int) -> None:
    """Measured at `smallest` or above, within 15 % everywhere from a tenth of the progress on, not at the end alone.

    With the noise scales of the ends of epochs it is not: early on they are far from those of the epoch as a whole.
    """
    runs = _runs(model)

    def worst(source: Run, noise_scales: list[float]) -> float:
        begin = int(np.searchsorted(source.progress, source.progress[-1] / 10))
        return max(abs(error) for run in runs.values() for error in errors(source, noise_scales, run)[begin:])

    for source in [run for size, run in runs.items() if size >= smallest]:
        assert worst(source, source.counted) < 0.15, source.batch_size
    assert worst(runs[smallest], runs[smallest].recorded) > 0.15


@needs_runs
@pytest.mark.parametrize(("model", "smallest"), [("cifar10", 512), ("imagenet", 400)])
def test_without_the_bias_of_clipping_smaller_batches_will_do(model: str, smallest: int) -> None:
    """To the end of training within 15 %, measured at `smallest` or above; with the bias that one is beyond.

    Nothing is known of any run but the one that was measured. `smallest` was chosen after seeing all of them.
    """
    runs = _runs(model)
    for source in [run for size, run in runs.items() if size >= smallest]:
        for target in runs.values():
            assert abs(errors(source, source.unclipped, target)[-1]) < 0.15, (source.batch_size, target.batch_size)
    source, largest = runs[smallest], runs[max(runs)]
    assert abs(errors(source, source.counted, largest)[-1]) > 0.15


@needs_runs
@pytest.mark.parametrize("model", ["cifar10", "imagenet"])
def test_the_two_smallest_batches_together_tell_noise_from_signal(model: str) -> None:
    """Each alone takes noise for signal and is far off about the largest one; what both say of it is not."""
    runs = _runs(model)
    small, large, *_, largest = runs.values()
    for target in runs.values():
        assert abs(errors(large, from_two(small, large), target)[-1]) < 0.15, target.batch_size
    for one in (small, large):
        assert errors(one, one.counted, largest)[-1] > 0.25


@pytest.mark.parametrize("batch_size", [32, 128])
def test_clipping_is_undone(batch_size: int) -> None:
    """Estimates drawn about a signal that fades, clipped tensor by tensor, then averaged."""
    draw = np.random.default_rng(0)
    spread, noise_scales = 0.3, [300.0, 1000.0, 3000.0, 1e7]
    recorded = []
    for noise_scale in noise_scales:
        estimates = draw.normal(batch_size / noise_scale, spread, (40000, 50))
        recorded.append(batch_size / np.maximum(estimates, 0).mean())
    assert recorded[1] < 0.7 * noise_scales[1]
    found = largest_spread([batch_size / one for one in recorded])
    assert found == pytest.approx(spread, rel=0.02)
    # The last one gives the spread: no signal is left of it, as there is none.
    assert without_clipping(recorded, batch_size, found)[:3] == pytest.approx(noise_scales[:3], rel=0.1)
    assert without_clipping(recorded, batch_size, found)[3] > 1e5


def test_where_nothing_is_below_zero_nothing_changes() -> None:
    assert without_clipping([10.0, 0.0], 1000, 0.1) == [10.0, 0.0]
