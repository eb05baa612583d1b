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
        means, inverse_deviations = [], []
        for piece, output, one in zip(values.split(rows), outputs.split(rows), moved, strict=True):
            statistics = torch.empty(2, values.shape[1], dtype=_statistics_dtype(values, weight, one.mean)).unbind()
            torch.native_batch_norm(
                piece, weight, bias, one.mean, one.var, True, one.momentum, eps, out=(output, *statistics)
            )
            means.append(statistics[0])
            inverse_deviations.append(statistics[1])
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
        each = [
            torch.ops.aten.native_batch_norm_backward(
                of_output, piece, weight, None, None, mean, inverse_deviation, True, ctx.eps, list(needed)
            )
            for of_output, piece, mean, inverse_deviation in zip(
                gradient.split(ctx.rows), values.split(ctx.rows), ctx.means, ctx.inverse_deviations, strict=True
            )
        ]
        of_values, of_weight, of_bias = zip(*each, strict=True)
        return (
            torch.cat(of_values) if needed[0] else None,
            torch.stack(of_weight).sum(0) if needed[1] else None,
            torch.stack(of_bias).sum(0) if needed[2] else None,
            None,
            None,
            None,
        )


def _statistics_dtype(values: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The one that the kernel computes in: values may have a lower precision than parameters."""
    return next((one.dtype for one in parameters if one is not None), values.dtype)
