"""The gradient noise scale of a run, from the norms of gradients that it computes anyway, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.noise import NoiseScale, SmoothedNoise
from paceline.parallel import Assignment
from paceline.parallel.gradient_norms import GradientNorms, TakeNorms
from paceline.spec import Job
from paceline.spec.codec import from_mapping, to_mapping

# Gradient noise changes slowly, and a small model's norms every step would cost more than 1 % of its time.
_EVERY_STEPS = 2

# Reading a number makes the host wait for a GPU, so norms are read this many steps at a time.
_READ_STEPS = 50

_FAR_BEYOND = 4.0
"""A batch of so many noise scales is worth a warning: four fifths of what its samples could teach are lost."""


@dataclass
class NoiseMeter:
    """Takes gradient norms step by step; knows the smoothed noise."""

    job: Job
    scaler: torch.amp.GradScaler
    device: torch.device
    _smoothed: SmoothedNoise = field(default_factory=SmoothedNoise)
    _unread: list[GradientNorms] = field(default_factory=list)

    def for_step(self, step: int, assignment: Assignment) -> TakeNorms | None:
        """The function that takes the gradient norms of a step; None if they are not needed."""
        is_short = 2 * assignment.global_size < self.job.global_batch_size  # its norms are too noisy to use
        if not self.job.measure_noise or is_short or step % _EVERY_STEPS:
            return None
        if not self.scaler.is_enabled():
            return self.take
        square = self.scaler.scale(torch.ones((), device=self.device)).square()
        return lambda norms: self.take(
            replace(norms, small_sqr=norms.small_sqr / square, large_sqr=norms.large_sqr / square)
        )

    def take(self, norms: GradientNorms) -> None:
        """Norms of gradients that are not scaled."""
        self._unread.append(norms)
        if len(self._unread) == _READ_STEPS:
            self.read()

    def read(self) -> SmoothedNoise:
        """The noise scale from all steps so far."""
        if self._unread:
            values = torch.stack([torch.stack([one.small_sqr, one.large_sqr]).double() for one in self._unread])
            for norms, (small_sqr, large_sqr) in zip(self._unread, values.tolist(), strict=True):
                one = NoiseScale.from_norms(small_sqr, norms.small_batch, large_sqr, norms.large_batch)
                self._smoothed = self._smoothed.after(one)
            self._unread.clear()
        return self._smoothed

    def scale(self) -> float | None:
        """The noise scale in samples; None where it was not measured or no signal shows in the noise yet."""
        mean = self.read().mean
        return None if mean is None or not math.isfinite(mean.samples) else mean.samples

    def state_dict(self) -> dict[str, Any]:
        return to_mapping(self.read())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.job.measure_noise:
            self._smoothed = from_mapping(SmoothedNoise, state)


def batch_warning(batch_size: int, noise_scale: float) -> str | None:
    """One sentence with numbers if the global batch is too large, else None.

    Relative to B single-sample steps, a batch of B makes 1 / (1 + B / B_noise) of the progress; one of B_noise needs
    twice the minimum of samples and twice the minimum of steps (McCandlish et al. 2018, section 2.3).

    Args:
        noise_scale: B_noise in samples.
    """
    ratio = batch_size / noise_scale if noise_scale > 0 else 0.0
    if ratio <= _FAR_BEYOND:
        return None
    return (
        f"The global batch of {batch_size:,} samples is {ratio:.1f} times the gradient noise scale "
        f"({noise_scale:,.0f}): {ratio / (1 + ratio):.0%} of what its samples could teach is lost. A batch of "
        f"{max(1, round(noise_scale)):,} would come as far with {2 / (1 + ratio):.0%} of the samples, in "
        f"{2 * ratio / (1 + ratio):.1f} times the steps."
    )
