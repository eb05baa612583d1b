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


def efficiency(batch_size: float, noise_scale: float, base_batch_size: float = 0.0) -> float:
    """What a sample is worth in a batch of `batch_size`, measured by one in a batch of `base_batch_size`.

    (B_noise + B_0) / (B_noise + B): Qiao et al., "Pollux", 2021, arXiv 2008.12260, section 3. With B_0 = 0, the limit
    of small batches, it is 1 / (1 + B / B_noise). An infinite noise scale makes every sample worth the same.
    """
    if math.isinf(noise_scale) or batch_size == base_batch_size:
        return 1.0
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)
