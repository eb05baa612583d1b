"""Batch norm whose statistics are those of the whole global batch, on CPU too."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import (
    _disable_dynamo,  # torch.compiler.disable loads the compiler, for seconds, where it is written
)
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ModelError
from paceline.parallel.batch_norm.normalise_apart import wide


class BatchNorm(_BatchNorm):
    """Batch norm of inputs (b, channels, ...) with any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"A batch norm layer needs at least 2 dimensions, batch and channels; got {input.dim()}.")


class SyncBatchNorm(BatchNorm):
    """Batch norm over the global batch: every worker contributes as many values as it has, even none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: dist.ProcessGroup | None = None
        self.idle = False
        """Set where this worker's batch is a stand-in that must not be counted."""

    @_disable_dynamo  # which shards it sees is no part of a compiled graph's input
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        mean, var, count = _global_statistics(input.detach(), self.group, counted=not self.idle)
        if self.track_running_stats:
            self._track(mean, var, count)
        output: Tensor = _SyncNormalise.apply(  # type: ignore[no-untyped-call]
            input, wide(self.weight), wide(self.bias), mean, var, count, self.eps, self.group, self.idle
        )
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        # Tensor arithmetic instead of an `if`: reading a number would make the CPU wait for the device.
        has_variance = count > 1
        tracked = cast(Tensor, self.num_batches_tracked)
        tracked += has_variance
        for running, batch in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            running = cast(Tensor, running)
            mean_of_all = tracked.clamp(min=1).to(running.dtype).reciprocal()
            factor = mean_of_all if self.momentum is None else self.momentum
            moved = running.lerp(batch.to(running.dtype), factor)
            running.copy_(torch.where(has_variance, moved, running))


def _channelwise(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *([1] * (like.dim() - 2)))


def _global_statistics(
    input: Tensor, group: dist.ProcessGroup | None, *, counted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel over all workers, and the number of values behind them.

    Per-worker statistics are combined by the parallel formula of Chan, Golub and LeVeque (1983), which avoids the
    cancellation of sum-of-squares formulas.
    """
    values = input if input.dtype == torch.float64 else input.float()
    dims = [d for d in range(input.dim()) if d != 1]
    var, mean = torch.var_mean(values, dim=dims, correction=0)
    count = torch.full(
        (1,), float(input.numel() // input.shape[1] if counted else 0), dtype=mean.dtype, device=mean.device
    )
    mine = torch.cat([count, mean, var])
    if not counted:  # zero times a stand-in's overflow would be NaN on all workers
        mine.zero_()
    if group is None:
        everyone = mine.unsqueeze(0)
    else:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        everyone = torch.stack(parts)
    counts, means, variances = everyone.split([1, input.shape[1], input.shape[1]], dim=1)
    total = counts.sum()
    global_mean = (counts * means).sum(0) / total
    global_var = (counts * (variances + (means - global_mean) ** 2)).sum(0) / total
    return global_mean, global_var, total


class _SyncNormalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, whose gradient sees that mean and var came from everyone.

    dx = weight / std * (dy - mean(dy) - x_hat mean(dy x_hat)), both means over the global batch
    (Ioffe and Szegedy, "Batch normalization", 2015, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        group: dist.ProcessGroup | None,
        idle: bool,
    ) -> Tensor:
        inv_std = (var + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, inv_std)
        ctx.count, ctx.group, ctx.has_bias, ctx.idle = count, group, bias is not None, idle
        return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inv_std = ctx.saved_tensors
        dims = [d for d in range(input.dim()) if d != 1]
        grad = grad_output.to(mean.dtype)
        x_hat = (input.to(mean.dtype) - _channelwise(mean, input)) * _channelwise(inv_std, input)
        grad_bias = grad.sum(dims)
        grad_weight = (grad * x_hat).sum(dims)
        sums = torch.stack([grad_bias, grad_weight])
        if ctx.idle:
            sums.zero_()
        if ctx.group is not None:
            dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_grad_x_hat = sums / ctx.count
        scale = inv_std if weight is None else inv_std * weight.to(mean.dtype)
        grad_input = _channelwise(scale, input) * (
            grad - _channelwise(mean_grad, input) - x_hat * _channelwise(mean_grad_x_hat, input)
        )
        if ctx.idle:  # a stand-in had no part in the statistics, so their gradient is none of its own
            grad_input.zero_()
        return (
            grad_input.to(input.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(mean.dtype) if ctx.has_bias else None,
            *(None,) * 6,
        )
