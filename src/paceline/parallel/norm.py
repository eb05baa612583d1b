"""Batch norm whose statistics do not depend on how many devices share the batch.

`ShardBatchNorm` normalises each virtual shard by its own statistics (ghost batch norm: Hoffer, Hubara, Soudry,
"Train longer, generalize better", 2017) even when several shards go through the model together, and moves its
running statistics once per step, by the mean over all shards of the global batch. `SyncBatchNorm` uses the
statistics of the whole global batch, on CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import (
    _disable_dynamo,  # torch.compiler.disable loads the compiler, for seconds, where it is written
)
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ModelError


class ShardSizes:
    """Which virtual shards are in the model right now; one value shared by all norm layers of a model."""

    def __init__(self) -> None:
        self.current: tuple[int, ...] | None = None
        """Samples in each shard of this forward pass; None outside of a training step."""
        self.all: tuple[int, ...] = ()
        """Samples in each shard of the whole global batch."""
        self.in_backward = False
        """Set while gradients are computed: activation checkpointing runs layers again, which says nothing new."""


class ShardBatchNorm(_BatchNorm):
    """Normalises every virtual shard by itself; holds the step's weighted statistics until they are collected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shards = ShardSizes()
        self.batch_mean: Tensor | None = None
        self.batch_var: Tensor | None = None
        self.batch_weight: Tensor | None = None
        """The part of the global batch behind them; more than all of it in a layer that is called several times."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"A batch norm layer needs at least 2 dimensions, batch and channels; got {input.dim()}.")

    @_disable_dynamo  # which shards it sees is no part of a compiled graph's input
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        sizes = self.shards.current
        if not self.training or sizes is None:
            return super().forward(input)
        rows, remainder = divmod(input.shape[0], sum(sizes))
        if remainder:
            raise ModelError(
                f"A batch norm layer got {input.shape[0]} rows for {sum(sizes)} samples; it cannot tell which row "
                "belongs to which virtual shard: use norm = 'local' for this model."
            )
        outputs = [
            self._normalise(shard, size)
            for shard, size in zip(input.split([s * rows for s in sizes]), sizes, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _normalise(self, shard: Tensor, size: int) -> Tensor:
        # With momentum 1 the fused kernel leaves the batch's own statistics in the running buffers given to it.
        dtype = torch.float64 if shard.dtype == torch.float64 else torch.float32
        mean = torch.zeros(self.num_features, dtype=dtype, device=shard.device)
        var = torch.zeros_like(mean)
        output = torch.batch_norm(
            shard, self.weight, self.bias, mean, var, True, 1.0, self.eps, torch.backends.cudnn.enabled
        )
        values_per_sample = shard.shape[0] // size * shard[0, 0].numel()
        if self.track_running_stats and size * values_per_sample > 1 and not self.shards.in_backward:
            # A shard with one value a channel has no variance: it says nothing, here and in the total weight.
            weight = size / sum(s for s in self.shards.all if s * values_per_sample > 1)
            mean, var = mean * weight, var * weight
            total = mean.new_full((1,), weight)
            self.batch_mean = mean if self.batch_mean is None else self.batch_mean + mean
            self.batch_var = var if self.batch_var is None else self.batch_var + var
            self.batch_weight = total if self.batch_weight is None else self.batch_weight + total
        return output


class NormStatistics:
    """The batch statistics of all `ShardBatchNorm` layers of a model, as one flat vector that workers can add."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, ShardBatchNorm) and m.track_running_stats]
        known = {id(m.shards): m.shards for m in model.modules() if isinstance(m, ShardBatchNorm)}
        # Whoever looks at the same model, to train it or to call it from another's loss, sets the same sizes.
        self.shards = next(iter(known.values())) if len(known) == 1 else ShardSizes()
        for layer in model.modules():
            if isinstance(layer, ShardBatchNorm):
                layer.shards = self.shards
        # One more number a layer: the weight of all that was added.
        self.length = sum(2 * layer.num_features + 1 for layer in self.layers)

    def collect(self, like: Tensor) -> Iterator[Tensor]:
        """The statistics since the last call: slices of a vector of `length` elements, of the dtype of `like`."""
        for layer in self.layers:
            if layer.batch_mean is None or layer.batch_var is None or layer.batch_weight is None:
                yield like.new_zeros(2 * layer.num_features + 1)
            else:
                yield layer.batch_mean.to(like.dtype)
                yield layer.batch_var.to(like.dtype)
                yield layer.batch_weight.to(like.dtype)
            layer.batch_mean = layer.batch_var = layer.batch_weight = None

    def reset(self) -> None:
        """Forget what was seen since the last `collect`."""
        self.shards.current = None
        for layer in self.layers:
            layer.batch_mean = layer.batch_var = layer.batch_weight = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, gradients are computed: layers that run again (activation checkpointing) count nothing."""
        self.shards.in_backward = True
        try:
            yield
        finally:
            self.shards.in_backward = False

    @torch.no_grad()
    def apply(self, total: Tensor) -> None:
        """Move the running statistics by the sum over all workers of what they collected, if all of it is finite."""
        is_finite = torch.isfinite(total).all()
        start = 0
        for layer in self.layers:
            width = layer.num_features
            mean, var, weight = total[start : start + 2 * width + 1].split([width, width, 1])
            start += 2 * width + 1
            # Tensor arithmetic instead of an `if`: reading the weight would make the CPU wait for the device.
            seen = ((weight > 0) & is_finite).to(mean.dtype)
            weight = weight + (1 - seen)
            count = cast(Tensor, layer.num_batches_tracked)
            count += seen.view(()).to(count.dtype)
            factor = seen * layer.momentum if layer.momentum is not None else seen / count.clamp(min=1)
            for running, batch in ((layer.running_mean, mean), (layer.running_var, var)):
                running = cast(Tensor, running)
                target = torch.where(is_finite, (batch / weight).to(running.dtype), running)
                running.lerp_(target, factor.to(running.dtype))


def has_other_norms(model: nn.Module) -> bool:
    """Whether there are batch norm layers whose statistics depend on all samples that go through them together."""
    return any(isinstance(layer, _BatchNorm) and not isinstance(layer, ShardBatchNorm) for layer in model.modules())


def unknown_buffers(model: nn.Module) -> list[Tensor]:
    """All buffers but those of our norm layers, which keep theirs equal on all workers."""
    layers = [layer for layer in model.modules() if isinstance(layer, ShardBatchNorm | SyncBatchNorm)]
    known = {id(buffer) for layer in layers for buffer in layer._buffers.values()}
    return [buffer for buffer in model.buffers() if id(buffer) not in known]


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the global batch: every worker contributes as many values as it has, even none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: dist.ProcessGroup | None = None
        self.idle = False
        """Set where this worker's batch is a stand-in that must not be counted."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"A batch norm layer needs at least 2 dimensions, batch and channels; got {input.dim()}.")

    @_disable_dynamo  # which shards it sees is no part of a compiled graph's input
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        mean, var, count = _global_statistics(input.detach(), self.group, counted=not self.idle)
        if self.track_running_stats and count > 1:
            self._track(mean, var * (count / (count - 1)))
        output: Tensor = _SyncNormalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, var, count, self.eps, self.group, self.idle
        )
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        tracked = cast(Tensor, self.num_batches_tracked)
        tracked += 1
        factor = 1.0 / float(tracked) if self.momentum is None else self.momentum
        cast(Tensor, self.running_mean).lerp_(mean, factor)
        cast(Tensor, self.running_var).lerp_(unbiased_var, factor)


def _channelwise(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *([1] * (like.dim() - 2)))


def _global_statistics(
    input: Tensor, group: dist.ProcessGroup | None, *, counted: bool
) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance per channel over all workers, and the number of values behind them.

    Worker statistics are merged pairwise-free by the parallel formula of Chan, Golub and LeVeque (1983), which does
    not cancel as sum-of-squares does.
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
    return global_mean, global_var, float(total)


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
        count: float,
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


def replace_batch_norm(model: nn.Module, kind: type[ShardBatchNorm] | type[SyncBatchNorm]) -> nn.Module:
    """Every batch norm layer of `model` as one of `kind`, holding the very same parameters and buffers.

    A layer that stands in several places still does. In place but for the model itself being such a layer, so use
    what is returned.
    """
    layers = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, ShardBatchNorm | SyncBatchNorm)
    ]
    replacements: dict[nn.Module, nn.Module] = {layer: _replacement(layer, kind) for layer in layers}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children() would name a layer once only
            if child in replacements:
                setattr(module, name, replacements[child])
    return replacements.get(model, model)


def _replacement(original: _BatchNorm, kind: type[ShardBatchNorm] | type[SyncBatchNorm]) -> nn.Module:
    layer = kind(original.num_features, original.eps, original.momentum, False, original.track_running_stats)
    layer.affine = original.affine
    layer._parameters = original._parameters
    layer._buffers = original._buffers
    layer.training = original.training
    return layer


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Inside, a stand-in sample goes through the model: norm layers count nothing of it.

    Only they are switched: a model may use other parameters, and have other outputs, in evaluation mode.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]

    def set_idle(idle: bool) -> None:
        for layer in layers:
            if isinstance(layer, SyncBatchNorm):
                layer.idle = idle
            else:
                layer.training = not idle

    set_idle(True)
    try:
        yield
    finally:
        set_idle(False)
