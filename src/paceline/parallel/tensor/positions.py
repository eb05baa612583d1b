"""A stretch of a model in which every worker keeps its part of the positions: see `sequence`.

How many positions there are in all is known where the stretch begins and where it ends, and layers inside have to
know. Backward starts at the end, so the number is right again when activations are computed a second time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.tensor.axis import Axis, part
from paceline.parallel.tensor.exchange import (
    enter_from_parts,
    gather,
    memory_order,
    sum_gradients,
    take_own,
    total,
    total_in_parts,
)

_DIM = -2
"""Along which positions lie: (..., positions, width)."""


class Positions:
    """Those of what passes through one stretch now."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.current: int | None = None
        """How many in all; None outside of the stretch."""

    @property
    def length(self) -> int:
        """How many in all.

        Raises:
            ModelError: outside of the stretch.
        """
        if self.current is None:
            raise ModelError(
                "A layer that treats a part of the positions was called from elsewhere than the module it stands in: "
                "leave sequence parallelism out, or let modules call their own layers only."
            )
        return self.current

    def begin(self, whole: Tensor) -> Tensor:
        """This worker's part."""
        self.current = whole.shape[_DIM]
        return take_own(_set_in_backward(whole, self, None), _DIM, self.axis)

    def end(self, own: Tensor) -> Tensor:
        """All of them, whole on every worker."""
        whole = _set_in_backward(gather(own, _DIM, self.length, self.axis), self, self.length)
        self.current = None
        return whole

    def gather(self, own: Tensor) -> Tensor:
        """All of them, of which this worker goes on to compute a part of the features."""
        return enter_from_parts(own, _DIM, self.length, self.axis)

    def total(self, term: Tensor, bias: Tensor | None) -> Tensor:
        """The worker's part of the sum of every worker's term, plus the bias."""
        if term.shape[_DIM] != self.length:
            raise ModelError(
                f"A linear layer between whose outputs workers share {self.length} positions was given "
                f"{term.shape[_DIM]}: leave sequence parallelism out for this model."
            )
        return total_in_parts(term, bias, _DIM, self.axis)


def total_with_bias(term: Tensor, bias: Tensor | None, axis: Axis, positions: Positions | None) -> Tensor:
    """The sum of every worker's term, plus the bias: whole on all of them, or in a stretch the worker's positions."""
    if positions is not None:
        return positions.total(term, bias)
    summed = total(term, axis)
    return summed if bias is None else summed + bias


def _set_in_backward(tensor: Tensor, positions: Positions, length: int | None) -> Tensor:
    """The tensor as it is; when backward comes by, `length` becomes the current one."""
    same: Tensor = _SetInBackward.apply(tensor, positions, length)  # type: ignore[no-untyped-call]
    return same


class _SetInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, positions: Positions, length: int | None) -> Tensor:
        ctx.positions, ctx.length = positions, length
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.positions.current = ctx.length
        return grad, None, None


class PositionsLayerNorm(nn.LayerNorm):
    """Normalises this worker's positions, each by itself; the gradients of weight and bias are those of all."""

    positions: Positions

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = _summed(self.positions, self.weight, self.bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class PositionsRMSNorm(nn.RMSNorm):
    """As `PositionsLayerNorm`."""

    positions: Positions

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = _summed(self.positions, self.weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: PositionsLayerNorm,
    nn.RMSNorm: PositionsRMSNorm,
}


def _summed(positions: Positions, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    _ = positions.length  # only inside of its stretch: outside, gradients would be summed that are whole already
    found = iter(sum_gradients([parameter for parameter in parameters if parameter is not None], positions.axis))
    return tuple(None if parameter is None else next(found) for parameter in parameters)


class PositionsDropout(nn.Dropout):
    """Draws the mask of all positions, as one device does, and uses that of this worker's."""

    positions: Positions

    def forward(self, input: Tensor) -> Tensor:
        positions = self.positions
        return drop_own(input, _DIM, positions.length, self.p, positions.axis) if self.training else input


def drop_own(own: Tensor, dim: int, length: int, p: float, axis: Axis) -> Tensor:
    """Dropout on a part of what has `length` along `dim`: draws the mask of all of it, and uses its own slice."""
    if p == 0:
        return own
    start, stop = part(length, axis.degree, axis.rank)
    order, back = memory_order(own)
    shape = list(own.shape)
    shape[dim] = length
    mask = F.dropout(own.new_ones([shape[one] for one in order]).permute(back), p)
    # A copy: a view would keep the whole mask for backward.
    return own * mask.narrow(dim, start, stop - start).clone()
