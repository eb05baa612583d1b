"""Statistical efficiency: what a larger global batch costs in samples, and which one pays.

To reach one loss with a global batch of B samples takes (McCandlish et al., "An Empirical Model of Large-Batch
Training", 2018, arXiv 1812.06162, section 2.3)

    S(B) = S_min (1 + B_noise / B) steps,    so B S(B) = E_min (1 + B / B_noise) samples, E_min = S_min B_noise

with the gradient noise scale B_noise of `NoiseScale`. It grows while a model learns, often a hundredfold, so what holds
for a whole run is an average; `steps_to_progress` takes its whole course, and `noise_scale_of_gain` reads it from a run
that counted its own progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.errors import JobError
from paceline.spec.noise_scale import NoiseScale, SmoothedNoise, warning_about_batch

__all__ = [
    "BatchChoice",
    "LrRule",
    "NoiseScale",
    "SmoothedNoise",
    "efficiency",
    "goodput",
    "lr_gain",
    "noise_scale_of_gain",
    "recommend_batch",
    "samples_to_target",
    "steps_to_progress",
    "steps_to_target",
    "warmup_epochs",
    "warning_about_batch",
]

LrRule = Literal["linear", "sqrt", "adascale", "none"]


def steps_to_target(batch_size: float, noise_scale: float, min_steps: float) -> float:
    """S(B) = S_min (1 + B_noise / B), in steps; `min_steps` is S_min, what an endlessly large batch takes."""
    return min_steps * (1 + noise_scale / batch_size)


def samples_to_target(batch_size: float, noise_scale: float, min_samples: float) -> float:
    """B S(B) = E_min (1 + B / B_noise), in samples; `min_samples` is E_min, what a very small batch takes."""
    return min_samples / efficiency(batch_size, noise_scale)


def efficiency(batch_size: float, noise_scale: float, base_batch_size: float = 0.0) -> float:
    """What a sample is worth in a batch of `batch_size`, measured by one in a batch of `base_batch_size`.

    (B_noise + B_0) / (B_noise + B): Qiao et al., "Pollux", 2021, arXiv 2008.12260, section 3. With B_0 = 0, the limit
    of small batches, it is 1 / (1 + B / B_noise). An infinite noise scale makes every sample worth the same.
    """
    if math.isinf(noise_scale) or batch_size == base_batch_size:
        return 1.0
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)


def goodput(samples_per_s: float, batch_size: float, noise_scale: float, base_batch_size: float = 0.0) -> float:
    """Throughput x efficiency, in useful samples/s: what time to a target is inverse to (Pollux, section 3)."""
    return samples_per_s * efficiency(batch_size, noise_scale, base_batch_size)


@dataclass(frozen=True)
class BatchChoice:
    """A global batch and what it brings."""

    batch_size: int
    samples_per_s: float
    efficiency: float
    """Against the limit of small batches."""

    @property
    def goodput_per_s(self) -> float:
        """Useful samples/s."""
        return self.samples_per_s * self.efficiency


def recommend_batch(
    samples_per_s: Callable[[int], float], noise_scale: float, smallest: int, largest: int, multiple_of: int = 1
) -> BatchChoice:
    """The global batch with the highest goodput between two; of equal ones the smallest.

    Batches are tried 1 % apart: a smooth goodput is flat around its best.

    Args:
        samples_per_s: throughput with a global batch; called some hundred times.
        multiple_of: only multiples of it, such as the number of workers.

    Raises:
        JobError: no such multiple in the range.
    """
    first, last = -(-smallest // multiple_of), largest // multiple_of
    if not 1 <= first <= last:
        raise JobError(
            f"No global batch between {smallest:,} and {largest:,} is a multiple of {multiple_of:,}; widen the range."
        )
    best: BatchChoice | None = None
    count = first
    while True:
        batch_size = count * multiple_of
        tried = BatchChoice(batch_size, samples_per_s(batch_size), efficiency(batch_size, noise_scale))
        if best is None or tried.goodput_per_s > best.goodput_per_s:
            best = tried
        if count == last:
            return best
        count = min(last, max(count + 1, round(count * 1.01)))


def lr_gain(rule: LrRule, batch_size: float, base_batch_size: float, noise_scale: float | None = None) -> float:
    """The factor on a learning rate that was chosen for `base_batch_size`, with k = B / B_base.

    "linear" k (Goyal et al. 2017, section 2.1); "sqrt" sqrt(k) (Krizhevsky 2014); "none" 1; "adascale" the gain
    (var + sqr) / (var / k + sqr) with var = tr(Sigma) / B_base and sqr = |G|^2 (Johnson et al., "AdaScale SGD", 2020,
    arXiv 2007.05105), between 1 and k and the same as k x efficiency: a step of k times the samples is worth
    so many steps.

    Raises:
        JobError: "adascale" without a noise scale.
    """
    ratio = batch_size / base_batch_size
    if rule == "none":
        return 1.0
    if rule == "sqrt":
        return math.sqrt(ratio)
    if rule == "linear":
        return ratio
    if noise_scale is None:
        raise JobError("The learning-rate rule 'adascale' needs a measured noise scale; use 'linear' or 'sqrt'.")
    return ratio * efficiency(batch_size, noise_scale, base_batch_size)


def noise_scale_of_gain(gain: float, batch_size: float, base_batch_size: float) -> float:
    """The inverse of `lr_gain("adascale", ...)`: the noise scale, in samples, at which a step was worth `gain` steps.

    For a run that counts its progress in steps of the base batch (Johnson et al. 2020; Pollux): `gain` is progress over
    steps in an interval. With k = B / B_0 a step of progress takes

        1 / gain = 1 / k + (1 - 1 / k) / (1 + B_noise / B_0)    steps

    where the last factor knows the noise and no k. Its mean over the interval therefore stands for the whole course:
    `steps_to_progress` of what is returned here is right at any other batch, however the noise scale changed meanwhile;
    of a value measured at the end of the interval it is not. 0 for a gain of at most 1 and infinite for one of at least
    k: counting whole steps can lead to either.

    Raises:
        ValueError: the batch is not larger than the base, where every gain is 1.
    """
    ratio = batch_size / base_batch_size
    if ratio <= 1:
        raise ValueError(f"a batch of {batch_size} is not larger than the base of {base_batch_size}")
    if gain >= ratio:
        return math.inf
    return max(0.0, batch_size * (gain - 1) / (ratio - gain))


def warmup_epochs(gain: float, epochs: float) -> float:
    """Epochs over which a rate that grew by `gain` should rise: one for each doubling, at most a fifth of all.

    A rule of thumb: it gives Goyal et al. 2017 (section 2.2) their 5 epochs for 8,192 instead of 256 samples. Larger
    batches suffer most at the beginning because the noise scale is smallest there.
    """
    return min(math.log2(gain), epochs / 5) if gain > 1 else 0.0


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
