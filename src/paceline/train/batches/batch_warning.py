"""The warning about a global batch far beyond the gradient noise scale."""

from __future__ import annotations

FAR_BEYOND = 4.0
"""A batch of so many noise scales is worth a warning: four fifths of what its samples could teach are lost."""


def batch_warning(batch_size: int, noise_scale: float, num_workers: int = 1) -> str | None:
    """One sentence with numbers if the global batch is too large, or there are too many workers; else None.

    Relative to B single-sample steps, a batch of B makes 1 / (1 + B / B_noise) of the progress; one of B_noise needs
    twice the minimum of samples and twice the minimum of steps (McCandlish et al. 2018, section 2.3).

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
