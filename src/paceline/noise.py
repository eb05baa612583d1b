"""The gradient noise scale, and what a larger global batch costs in samples.

For the gradient g_i of one sample's loss, with mean G and covariance Sigma over the data, the mean over a batch of B
samples has E|G_B|^2 = |G|^2 + tr(Sigma) / B. The two terms are equal at the (simple) noise scale

    B_noise = tr(Sigma) / |G|^2

Far below it twice the batch makes about twice the progress a step; far above it, hardly any more. To reach one loss
with a global batch of B samples takes

    S(B) = S_min (1 + B_noise / B) steps,    so B S(B) = E_min (1 + B / B_noise) samples, E_min = S_min B_noise

(McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, sections 2.2,
2.3 and appendix A.1). The noise scale grows while a model learns, often a hundredfold, so what holds for a whole run is
an average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseScale:
    """Estimates of |G|^2 and tr(Sigma) in the units of the squared gradient; either may come out below zero."""

    grad_sqr: float
    grad_var: float
    """The variance of one sample's gradient."""

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


def efficiency(batch_size: float, noise_scale: float, base_batch_size: float = 0.0) -> float:
    """What a sample is worth in a batch of `batch_size`, measured by one in a batch of `base_batch_size`.

    (B_noise + B_0) / (B_noise + B): Qiao et al., "Pollux", 2021, arXiv 2008.12260, section 3. With B_0 = 0, the limit
    of small batches, it is 1 / (1 + B / B_noise). An infinite noise scale makes every sample worth the same.
    """
    if math.isinf(noise_scale) or batch_size == base_batch_size:
        return 1.0
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)
