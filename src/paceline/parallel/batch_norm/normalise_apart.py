"""Batch norm of several shards that lie one after the other in host memory, without a copy of any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moved:
    """Running statistics that the norm of one shard moves: of shape (channels,), or none."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float


def normalise_apart(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Sequence[int],
    moved: Sequence[Moved],
    eps: float,
) -> Tensor:
    """Normalise each of the neighbouring shards of `values` by its own mean and variance, as `torch.batch_norm` does.

    Args:
        values: (sum(rows), channels, ...), on a CPU.
        rows: the length of each shard in the first dimension.
        moved: for each shard.

    Returns:
        A tensor like `values`.
    """
    normalised: Tensor = _NormaliseApart.apply(values, weight, bias, tuple(rows), tuple(moved), eps)  # type: ignore[no-untyped-call]
    return normalised


class _NormaliseApart(torch.autograd.Function):
    """One kernel for each shard, which reads and writes where the shard lies."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: tuple[int, ...],
        moved: tuple[Moved, ...],
        eps: float,
    ) -> Tensor:
        outputs = torch.empty_like(values)
        dtype = _statistics_dtype(values, weight, moved[0].mean)
        means, inverse_deviations = (
            one.unbind() for one in torch.empty(2, len(rows), values.shape[1], dtype=dtype).unbind()
        )
        pieces = values.split_with_sizes(rows), outputs.split_with_sizes(rows)
        for piece, output, mean, inverse_deviation, one in zip(*pieces, means, inverse_deviations, moved, strict=True):
            torch.native_batch_norm(
                piece, weight, bias, one.mean, one.var, True, one.momentum, eps, out=(output, mean, inverse_deviation)
            )
            if is_one_value(piece):
                output.copy_(norm_of_one_value(piece, bias))
        ctx.save_for_backward(values, weight, bias)
        ctx.rows, ctx.eps, ctx.means, ctx.inverse_deviations = rows, eps, means, inverse_deviations
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # this gradient is to have one itself
            outputs = torch.cat(
                [
                    torch.batch_norm(one, weight, bias, None, None, True, 0.0, ctx.eps, False)
                    for one in values.split(ctx.rows)
                ]
            )
            wanted = [one for one, is_needed in zip((values, weight, bias), needed, strict=True) if is_needed]
            found = iter(torch.autograd.grad(outputs, wanted, gradient, create_graph=True))
            return *(next(found) if is_needed else None for is_needed in needed), None, None, None
        of_values = torch.empty_like(values)
        of_weight: list[Tensor] = []
        of_bias: list[Tensor] = []
        pieces = (one.split_with_sizes(ctx.rows) for one in (gradient, values, of_values))
        for of_output, piece, place, mean, inverse_deviation in zip(
            *pieces, ctx.means, ctx.inverse_deviations, strict=True
        ):
            of_piece, *of_parameters = torch.ops.aten.native_batch_norm_backward(
                of_output, piece, weight, None, None, mean, inverse_deviation, True, ctx.eps, needed
            )
            if needed[0]:
                place.copy_(of_piece)  # at once, while it is in the caches
            of_weight.append(of_parameters[0])
            of_bias.append(of_parameters[1])
        return (
            of_values if needed[0] else None,
            sum(of_weight[1:], of_weight[0]) if needed[1] else None,
            sum(of_bias[1:], of_bias[0]) if needed[2] else None,
            None,
            None,
            None,
        )


def is_one_value(values: Tensor) -> bool:
    """Whether each channel has one value, which is its own mean: the norm of it is the bias.

    A kernel gives the bias up to rounding, and on which side of the kink of a ReLU that lies would depend on what it
    normalises with it.
    """
    return values.numel() == values.shape[1]


def wide(parameter: Tensor | None) -> Tensor | None:
    """A parameter in the precision of the statistics that are noted: kernels want both in one."""
    return parameter.float() if parameter is not None and parameter.dtype.itemsize < 4 else parameter


def norm_of_one_value(values: Tensor, bias: Tensor | None) -> Tensor:
    return torch.zeros_like(values) if bias is None else bias.view(values.shape).to(values.dtype)


def _statistics_dtype(values: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The one that the kernel computes in: values may have a lower precision than parameters."""
    return next((one.dtype for one in parameters if one is not None), values.dtype)
