"""Training runs of the public artifact of Pollux (OSDI 2021, arXiv 2008.12260), and what one says of the others.

One run at each global batch, with AdaScale, to the same progress; a row is about one epoch of the smallest batch. What
its columns are:

- `progress` counts steps of the smallest batch: every step adds the gain of that moment (`lr_gain`);
- `iteration` numbers the run's own steps from 0, so there are one more of them;
- `grad_sqr` is |G|^2 and `grad_var` tr(Sigma) / (smallest batch), smoothed, as they were at the end of the epoch.

AdaptDL, which recorded them, estimated |G|^2 in every step and for every tensor without bias, then set what was below
zero to zero, and only then added up and smoothed: so its `adascale.py` of 2020. That these very runs were recorded so
is inferred from how |G|^2 depends on the batch in them. See `without_clipping`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from paceline.noise import lr_gain


@dataclass(frozen=True)
class Run:
    """What one run recorded at the end of every epoch."""

    batch_size: int
    base_batch_size: int
    progress: list[float]
    """In steps of the base batch."""
    steps: list[float]
    recorded: list[float]
    """Noise scales in samples, at the end of every epoch."""

    @property
    def counted(self) -> list[float]:
        """Noise scales in samples, each the mean of an epoch: from the progress that the run counted in it.

        At the base batch the count says nothing; there they are those recorded.
        """
        if self.batch_size == self.base_batch_size:
            return self.recorded
        intervals = zip(pairwise([0.0, *self.progress]), pairwise([0.0, *self.steps]), strict=True)
        gains = [(end - begin) / (last - first) for (begin, end), (first, last) in intervals]
        return [noise_scale_of_gain(gain, self.batch_size, self.base_batch_size) for gain in gains]

    @property
    def spread(self) -> float:
        """Of single estimates of |G|^2, in units of tr(Sigma) / B: `largest_spread` of what was recorded."""
        return largest_spread([self.batch_size / one for one in self.recorded])

    @property
    def unclipped(self) -> list[float]:
        """Those counted, less what clipping added to |G|^2."""
        return without_clipping(self.counted, self.batch_size, self.spread)


def read_runs(folder: Path, model: str) -> dict[int, Run]:
    """By global batch size, ascending."""
    rows = {}
    for path in folder.glob(f"{model}-validation-*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            rows[int(path.stem.rsplit("-", 1)[1])] = [
                {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)
            ]
    base = min(rows)
    return {
        batch_size: Run(
            batch_size,
            base,
            [row["progress"] for row in rows[batch_size]],
            [row["iteration"] + 1 for row in rows[batch_size]],
            [base * row["grad_var"] / row["grad_sqr"] for row in rows[batch_size]],
        )
        for batch_size in sorted(rows)
    }


def errors(source: Run, noise_scales: Sequence[float], target: Run) -> list[float]:
    """Relative errors of the steps of `target` to each point of progress, forecast from noise scales of `source`."""
    forecast = steps_to_progress(source.progress, noise_scales, target.batch_size, source.base_batch_size)
    points = np.minimum(source.progress, target.progress[-1])
    taken = np.interp(points, [0.0, *target.progress], [0.0, *target.steps])
    return list(np.interp(points, [0.0, *source.progress], [0.0, *forecast]) / taken - 1)


def from_two(small: Run, large: Run) -> list[float]:
    """Noise scales in samples, from two runs whose rows are about the same epochs.

    What noise adds to a recorded |G|^2 is taken to fall as 1 / B, as all of it does where clipping sets half of the
    estimates to zero. With 1 / B_noise = |G|^2 / tr(Sigma), two batch sizes then give both terms, however the excess
    changes during the training.
    """
    rows = zip(small.counted, large.counted, strict=True)
    sizes = small.batch_size, large.batch_size
    inverse = [(sizes[1] / of_large - sizes[0] / of_small) / (sizes[1] - sizes[0]) for of_small, of_large in rows]
    return [1 / one if one > 0 else math.inf for one in inverse]


def clipped_mean(signal: float) -> float:
    """E max(0, X) of a normal X of mean `signal` and deviation 1: signal Phi(signal) + phi(signal)."""
    return float(signal * ndtr(signal) + math.exp(-(signal**2) / 2) / math.sqrt(2 * math.pi))


def largest_spread(signals: Sequence[float]) -> float:
    """The largest deviation that estimates clipped at zero can have had, given their means.

    Even where there is no signal at all the mean is clipped_mean(0) = 0.4 of the deviation, so no mean can be smaller.
    Close to the truth where the signal all but vanishes once, as late in the training at a small batch.
    """
    return min(signals) / clipped_mean(0)


def without_clipping(noise_scales: Sequence[float], batch_size: int, spread: float) -> list[float]:
    """Noise scales, in samples, had estimates of |G|^2 below zero been kept.

    In units of tr(Sigma) / B the signal |G|^2 is B / B_noise, and the estimate of a single step, a product of two
    independent gradients, varies about it with a `spread` that depends on how many directions the noise has, not on the
    batch. Taken as normal and equal for all tensors, a signal s is recorded as spread x clipped_mean(s / spread), which
    is solved for s here. What is taken off is noise that was taken for signal; in units of |G|^2 it falls as 1 / B, and
    faster where signal prevails. Tensors that differ are biased more than equal ones (the excess is convex in the
    signal), so some of it is left.
    """
    found = []
    for noise_scale in noise_scales:
        recorded = batch_size / noise_scale / spread if noise_scale > 0 else math.inf
        if recorded <= clipped_mean(0):
            found.append(math.inf)
        elif recorded >= 8:
            # Eight deviations above zero nothing is clipped.
            found.append(noise_scale)
        else:
            signal = brentq(lambda signal, goal=recorded: clipped_mean(signal) - goal, 0.0, recorded)
            found.append(batch_size / (signal * spread) if signal > 0 else math.inf)
    return found


def noise_scale_of_gain(gain: float, batch_size: float, base_batch_size: float) -> float:
    """The inverse of `lr_gain("adascale", ...)`: the noise scale, in samples, at which a step was worth `gain` steps.

    For a run that counts its progress in steps of the base batch (Johnson et al. 2020; Pollux): `gain` is progress over
    steps in an interval. With k = B / B_0 a step of progress takes

        1 / gain = 1 / k + (1 - 1 / k) / (1 + B_noise / B_0)    steps

    where the last factor depends on the noise and not on k. Its mean over the interval therefore stands for the whole
    interval: `steps_to_progress` of the value returned here is right at any other batch, however the noise scale
    changed meanwhile; of a value measured at the end of the interval it is not. 0 for a gain of at most 1 and infinite
    for one of at least k: counting whole steps can lead to either.

    Raises:
        ValueError: the batch is not larger than the base, where every gain is 1.
    """
    ratio = batch_size / base_batch_size
    if ratio <= 1:
        raise ValueError(f"a batch of {batch_size} is not larger than the base of {base_batch_size}")
    if gain >= ratio:
        return math.inf
    return max(0.0, batch_size * (gain - 1) / (ratio - gain))


def steps_to_progress(
    progress: Sequence[float], noise_scales: Sequence[float], batch_size: float, base_batch_size: float
) -> list[float]:
    """Steps with `batch_size` to each point of `progress`, which counts steps with `base_batch_size`.

    A step makes the progress of `lr_gain("adascale", ...)` steps of the base batch (Johnson et al. 2020:
    scale-invariant iterations), so the steps are the sum of what each interval of progress divided by its gain takes.

    Args:
        progress: in ascending order; the first interval begins at 0.
        noise_scales: B_noise during the interval that ends at each point, in samples; may be 0 or infinite.
    """
    steps, total = [], 0.0
    for (begin, end), noise_scale in zip(pairwise([0.0, *progress]), noise_scales, strict=True):
        total += (end - begin) / lr_gain("adascale", batch_size, base_batch_size, noise_scale)
        steps.append(total)
    return steps
