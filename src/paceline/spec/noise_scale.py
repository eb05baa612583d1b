"""`NoiseScale`: how many samples it takes before a gradient is more signal than noise.

For the gradient g_i of one sample's loss, with mean G and covariance Sigma over the data, the mean over a batch of B
samples has E|G_B|^2 = |G|^2 + tr(Sigma) / B. The two terms are equal at the (simple) noise scale

    B_noise = tr(Sigma) / |G|^2

Far below it twice the batch makes about twice the progress a step; far above it, hardly any more. McCandlish, Kaplan,
Amodei et al., "An Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, section 2.2 and appendix A.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAR_BEYOND = 4.0
"""A batch of so many noise scales is worth a warning: four fifths of what its samples could teach is lost."""


@dataclass(frozen=True)
class NoiseScale:
    """Estimates of |G|^2 and tr(Sigma) in the units of the squared gradient; either may come out below zero."""

    grad_sqr: float
    grad_var: float
    """Of one sample."""

    @property
    def samples(self) -> float:
        """B_noise; 0 without variance, infinite where no signal can be told from zero."""
        if self.grad_var <= 0:
            return 0.0
        return self.grad_var / self.grad_sqr if self.grad_sqr > 0 else math.inf

    @classmethod
    def from_norms(cls, small_sqr: float, small_batch: float, large_sqr: float, large_batch: float) -> NoiseScale:
        """Unbiased, from mean squared norms of gradients over `small_batch` and over `large_batch` samples.

        McCandlish et al. 2018, appendix A.1: two equations E|G_B|^2 = |G|^2 + tr(Sigma) / B for two unknowns. The two
        norms may come from the same samples, since expectations add up whatever depends on what. Where batches of one
        kind differ in size, `small_batch` is 1 / (mean of 1 / B), with the weights of the mean of the norms.

        Raises:
            ValueError: `small_batch` is not the smaller one.
        """
        if not 0 < small_batch < large_batch:
            raise ValueError(f"a batch of {small_batch} samples is not smaller than one of {large_batch}")
        grad_sqr = (large_batch * large_sqr - small_batch * small_sqr) / (large_batch - small_batch)
        grad_var = (small_sqr - large_sqr) / (1 / small_batch - 1 / large_batch)
        return cls(grad_sqr, grad_var)


@dataclass(frozen=True)
class SmoothedNoise:
    """Exponential averages of |G|^2 and of tr(Sigma), each by itself: a mean of ratios would be biased.

    The first measurements would count for too little, so averages are divided by 1 - decay^n (Kingma and Ba, "Adam",
    2014, section 3).
    """

    decay: float = 0.99
    num_measured: int = 0
    _grad_sqr: float = 0.0
    _grad_var: float = 0.0

    def after(self, one: NoiseScale) -> SmoothedNoise:
        """With one more measurement; one that is not finite, as after an overflow, is left out."""
        if not (math.isfinite(one.grad_sqr) and math.isfinite(one.grad_var)):
            return self
        kept, new = self.decay, 1 - self.decay
        return SmoothedNoise(
            self.decay,
            self.num_measured + 1,
            kept * self._grad_sqr + new * one.grad_sqr,
            kept * self._grad_var + new * one.grad_var,
        )

    @property
    def mean(self) -> NoiseScale | None:
        """None before the first measurement."""
        if not self.num_measured:
            return None
        weight = 1 - self.decay**self.num_measured
        return NoiseScale(self._grad_sqr / weight, self._grad_var / weight)


def warning_about_batch(batch_size: int, noise_scale: float, num_workers: int = 1) -> str | None:
    """One sentence with numbers where a global batch is wasteful, or workers are; else None.

    Of what B samples could teach one after the other, a batch teaches 1 / (1 + B / B_noise); a batch of B_noise needs
    twice the fewest samples and twice the fewest steps (McCandlish et al. 2018, section 2.3).

    Args:
        noise_scale: B_noise in samples.
    """
    if num_workers > batch_size:
        return (
            f"{num_workers - batch_size} of {num_workers} workers have no sample in a global batch of "
            f"{batch_size:,}; use at most {batch_size:,}."
        )
    if noise_scale <= 0 or batch_size <= FAR_BEYOND * noise_scale:
        return None
    ratio = batch_size / noise_scale
    enough = max(1, round(noise_scale))
    sentence = (
        f"The global batch of {batch_size:,} samples is {ratio:.1f} times the gradient noise scale ({enough:,}): "
        f"{ratio / (1 + ratio):.0%} of what its samples could teach is lost. A batch of {enough:,} would come as far "
        f"with {2 / (1 + ratio):.0%} of the samples, in {2 * ratio / (1 + ratio):.1f} times the steps"
    )
    if num_workers > enough:
        sentence += f", and leave {num_workers - enough} of {num_workers} workers idle"
    elif num_workers > 1:
        sentence += f" of {enough / num_workers:,.0f} samples a worker, so fewer workers may do as well"
    return sentence + "."
