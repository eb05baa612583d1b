"""The gradient noise scale of a run, from the norms of the gradients that it computes anyway."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.noise import NoiseScale, SmoothedNoise
from paceline.parallel.gradient_norms import GradientNorms, TakeNorms

# Reading a number makes the host wait for a GPU, so norms are read this many steps at a time.
_READ_STEPS = 50


class NoiseMeter:
    """Takes gradient norms step by step; knows the smoothed noise."""

    def __init__(self, smoothed: SmoothedNoise | None = None) -> None:
        self._smoothed = smoothed or SmoothedNoise()
        self._unread: list[GradientNorms] = []

    def take(self, norms: GradientNorms) -> None:
        self._unread.append(norms)
        if len(self._unread) == _READ_STEPS:
            self.read()

    def scaled_by(self, loss_scale: Tensor) -> TakeNorms:
        """`take` for a step whose gradients are `loss_scale` times too large."""

        def take(norms: GradientNorms) -> None:
            square = loss_scale.square()
            self.take(replace(norms, small_sqr=norms.small_sqr / square, large_sqr=norms.large_sqr / square))

        return take

    def read(self) -> SmoothedNoise:
        """With all steps that have been taken by now."""
        if self._unread:
            values = torch.stack([torch.stack([one.small_sqr, one.large_sqr]).double() for one in self._unread])
            for norms, (small_sqr, large_sqr) in zip(self._unread, values.tolist(), strict=True):
                one = NoiseScale.from_norms(small_sqr, norms.small_batch, large_sqr, norms.large_batch)
                self._smoothed = self._smoothed.after(one)
            self._unread.clear()
        return self._smoothed
