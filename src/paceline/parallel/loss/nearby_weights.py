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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.dtensor_type import local_shard
from paceline.parallel.dtensor import reshard

_MOST_CHANGE = 0.1
"""By how much a weight grows at most, relative to itself; or what a weight of zero becomes at most."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes as a number."""

_MOST_AT_ONCE = 2**24
"""How many numbers are changed at once: what is needed to change them lies in memory beside them."""


@contextmanager
def nearby_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each weight that is trained is larger by a random part of itself, and of the same sign.

    A copy of the weights may not fit beside them, nor can rounded sums be undone. As integers the bits of numbers of
    one sign are in the order of the numbers: some are added to them, and subtracted in the end.
    """
    reshard(model)  # what workers have gathered is a copy
    changed: list[tuple[Tensor, Tensor | None]] = []
    try:
        for numbers in _pieces(model):
            is_zero = numbers == 0
            piece = numbers, is_zero if is_zero.any() else None
            _bits(numbers).add_(_growth(*piece))
            changed.append(piece)
        yield
    finally:
        reshard(model)
        for piece in reversed(changed):  # parameters may share memory
            _bits(piece[0]).sub_(_growth(*piece))


def _pieces(model: nn.Module) -> Iterator[Tensor]:
    """The numbers that are trained, a piece of a parameter at a time; views. Those are left out that consist of 8 bits,
    or of other tensors."""
    for parameter in model.parameters():
        weights = torch.atleast_1d(local_shard(parameter))
        is_plain = weights.dtype.itemsize > 1 and not is_traceable_wrapper_subclass(weights)
        if parameter.requires_grad and is_plain:
            numbers = torch.view_as_real(weights) if weights.is_complex() else weights
            yield from numbers.split(max(1, _MOST_AT_ONCE * len(numbers) // max(1, numbers.numel())))


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(_INTEGERS[numbers.dtype.itemsize])


def _growth(numbers: Tensor, is_zero: Tensor | None) -> Tensor:
    """What is added to the bits of `numbers`, of any shape; the same on workers that hold the same ones.

    Args:
        is_zero: which of them are zero before anything is added; None: none.
    """
    eps = torch.finfo(numbers.dtype).eps
    draws = torch.Generator(numbers.device).manual_seed(0)
    growth = torch.empty_like(_bits(numbers)).random_(0, int(_MOST_CHANGE / eps) + 1, generator=draws)
    if is_zero is None:
        return growth
    return torch.where(is_zero, _bits(growth.to(numbers.dtype).mul_(eps)), growth)
