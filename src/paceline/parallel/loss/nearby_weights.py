"""A model with weights that lie near to its own, to see what a loss is beside them.

What a loss does to the gradient need not show in its value. Advantages that are normalised over a batch have the mean
zero, and so has PPO's loss as long as the ratio of probabilities is one; a distance from a reference is zero at the
reference. Beside that point the values tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.dtensor_type import local_shard
from paceline.parallel.dtensor import reshard

_MOST_CHANGE = 0.1
"""By how much a weight grows at most, relative to itself; or what a weight of zero becomes at most."""


@contextmanager
def nearby_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each weight that is trained is larger by a random part of itself, and of the same sign."""
    reshard(model)  # what workers have gathered is a copy
    held = [local_shard(one) for one in model.parameters() if one.requires_grad and one.dtype.itemsize > 1]
    kept = [one.clone() for one in held]
    try:
        for one in held:
            one += _change_of(one)
        yield
    finally:
        reshard(model)
        for one, before in zip(held, kept, strict=True):
            one.copy_(before)


def _change_of(weights: Tensor) -> Tensor:
    """The same on workers that hold the same weights."""
    draws = torch.Generator(weights.device).manual_seed(0)
    parts = torch.rand(weights.shape, generator=draws, dtype=weights.real.dtype, device=weights.device)
    return parts.mul_(_MOST_CHANGE) * weights.masked_fill(weights == 0, 1.0)
