"""Batch norm whose statistics do not depend on how many devices share the batch.

`ShardBatchNorm` normalises each virtual shard by its own statistics (ghost batch norm: Hoffer, Hubara, Soudry,
"Train longer, generalize better", 2017) even when several shards go through the model together, and moves its
running statistics once per step, by the mean over all shards of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._compile import (
    _disable_dynamo,  # torch.compiler.disable loads the compiler, for seconds, where it is written
)
from torch._prims_common import suggest_memory_format
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.containers import on_device
from paceline.errors import ModelError
from paceline.parallel.assignment import ShardRange
from paceline.parallel.batch_norm.normalise_apart import Moved, is_one_value, norm_of_one_value, normalise_apart, wide
from paceline.parallel.batch_norm.repeated import Repeated, RepeatedParameters, shard_by_shard, source_of
from paceline.parallel.batch_norm.sync_norm import BatchNorm, SyncBatchNorm


class CurrentPass:
    """The current forward pass: which virtual shards it holds. One object shared by all norm layers of a model."""

    def __init__(self) -> None:
        self.shards: ShardRange | None = None
        """None outside of a training step."""
        self.is_noted = True
        """Whether the pass trains the model, so that its statistics count."""
        self.in_backward = False
        """Set while gradients are computed: activation checkpointing runs layers again, which says nothing new."""
        self.repeated: Mapping[Tensor, Repeated] = {}
        """Parameters of the layers, repeated for these shards."""


@dataclass
class _Seen:
    """What a layer sees in a pass: statistics of each shard, the weighted mean over the layer's calls."""

    mean: Tensor
    """Means, and below variances, of shape (shards * channels,); zero where nothing was seen."""
    var: Tensor
    weights: list[float]
    """For each shard the sum over the calls."""


class ShardBatchNorm(BatchNorm):
    """Normalises every virtual shard by itself; notes the statistics of passes that train the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.current = CurrentPass()
        self.seen: _Seen | None = None
        """None where nothing is to be noted."""

    @_disable_dynamo  # which shards it sees is no part of a compiled graph's input
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        shards = self.current.shards
        if not self.training or shards is None:
            return super().forward(input)
        sizes = shards.sizes
        rows, remainder = divmod(input.shape[0], sum(sizes))
        values_per_sample = rows * math.prod(input.shape[2:])
        if remainder:  # as where rows are the nodes of graphs
            if len(sizes) > 1:
                raise ModelError(
                    f"A batch norm layer got {input.shape[0]} rows for {sum(sizes)} samples; it cannot tell which row "
                    "belongs to which virtual shard: use shard_by_shard = true."
                )
            values_per_sample = 2 if input.numel() > input.shape[1] else 0  # one value is no statistic
        seen = self.seen
        if self.current.in_backward and self.current.is_noted and self.track_running_stats:
            # The call is the same again, and says nothing new. Autograd wants it to keep as many tensors.
            mean, var = torch.zeros(
                (2, len(sizes) * self.num_features), dtype=_dtype_of(self), device=input.device
            ).unbind()
            seen = _Seen(mean, var, [0.0] * len(sizes))
        weights = shards.norm_weights(values_per_sample) if seen is not None else [0.0] * len(sizes)
        if shards.are_interleaved:
            return self._normalise_interleaved(input, sizes, rows, seen, weights[0])
        if len(sizes) == 1:
            return self._normalise(input, 1, 0, seen, weights[0])
        rows_of_shards = [size * rows for size in sizes]
        if input.device.type == "cpu":
            moved = [self._moved(1, number, seen, weight) for number, weight in enumerate(weights)]
            return normalise_apart(input, wide(self.weight), wide(self.bias), rows_of_shards, moved, self.eps)
        pieces = enumerate(input.split(rows_of_shards))
        return torch.cat([self._normalise(piece, 1, number, seen, weights[number]) for number, piece in pieces])

    def _normalise_interleaved(
        self, input: Tensor, sizes: tuple[int, ...], rows: int, seen: _Seen | None, seen_weight: float
    ) -> Tensor:
        """All shards by one kernel, to which every channel of every shard is a channel of its own."""
        num_shards, num_samples = len(sizes), sizes[0]
        shape = (num_samples * rows, num_shards * self.num_features, *input.shape[2:])
        if rows == 1:  # no value has to move, unless channels are last in memory
            output = self._normalise(input.reshape(shape), num_shards, 0, seen, seen_weight).reshape(input.shape)
        else:
            apart = input.unflatten(0, (num_samples, num_shards, rows)).transpose(1, 2)
            output = self._normalise(apart.reshape(shape), num_shards, 0, seen, seen_weight)
            output = output.view(apart.shape).transpose(1, 2).reshape(input.shape)
        return output.contiguous(memory_format=suggest_memory_format(input))

    def _normalise(self, values: Tensor, count: int, first: int, seen: _Seen | None, seen_weight: float) -> Tensor:
        """Normalise values of shape (rows, count * channels, ...): those of the pass's shards from `first` on.

        Args:
            seen_weight: the weight of each of these shards in this call.
        """
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if count > 1 and weight is not None and bias is not None:
            weight, bias = (self._repeated(one, count) for one in (weight, bias))
        weight, bias = wide(weight), wide(bias)
        moved = self._moved(count, first, seen, seen_weight)
        output = torch.batch_norm(
            values, weight, bias, moved.mean, moved.var, True, moved.momentum, self.eps, torch.backends.cudnn.enabled
        )
        if is_one_value(values):
            output = output + (norm_of_one_value(values, bias) - output).detach()
        return output

    def _moved(self, count: int, first: int, seen: _Seen | None, seen_weight: float) -> Moved:
        """Note that `count` shards from `first` on are seen in this call, and say where their statistics go."""
        if seen is None or not seen_weight:
            return Moved(None, None, 0.0)
        for shard in range(first, first + count):
            seen.weights[shard] += seen_weight
        width, start = count * self.num_features, first * self.num_features
        mean, var = seen.mean, seen.var
        if count < len(seen.weights):
            mean, var = mean.narrow(0, start, width), var.narrow(0, start, width)
        # With this momentum the fused kernel leaves the mean over the calls in the running buffers given to it.
        return Moved(mean, var, seen_weight / seen.weights[first])

    def _repeated(self, parameter: Tensor, count: int) -> Tensor:
        known = self.current.repeated.get(parameter)
        # Sharded parameters, and what a loss function puts in their place, are known only now. A layer that runs again
        # in backward may do so in a graph of its own, which must not reach into that of the others.
        if known is None or known[1] != source_of(parameter) or self.current.in_backward:
            return parameter.repeat(count)
        return known[0]


def _dtype_of(layer: ShardBatchNorm) -> torch.dtype:
    """The dtype of the statistics that are noted of a layer, which may itself compute in a lower precision."""
    return torch.float64 if cast(Tensor, layer.running_mean).dtype == torch.float64 else torch.float32


class NormStatistics:
    """The batch statistics of all `ShardBatchNorm` layers of a model, as one flat vector that workers can add.

    It holds mean and variance of one layer after the other, times their weight, and then the weights of all layers: the
    part of the global batch that was seen, which is more than all of it in a layer that is called several times.
    """

    def __init__(self, model: nn.Module) -> None:
        every = [m for m in model.modules() if isinstance(m, ShardBatchNorm)]
        self.exist = bool(every)
        # Those of one dtype are neighbours: their statistics are one tensor in a pass.
        self.layers = sorted(
            (layer for layer in every if layer.track_running_stats), key=lambda one: str(_dtype_of(one))
        )
        known = {id(layer.current): layer.current for layer in every}
        # Whoever looks at the same model, to train it or to call it from another's loss, sets the same value.
        self.current = next(iter(known.values())) if len(known) == 1 else CurrentPass()
        for layer in every:
            layer.current = self.current
        self._parameters = RepeatedParameters(every)
        self._widths = [layer.num_features for layer in self.layers for _ in range(2)]
        self.lengths = sum(self._widths), len(self.layers)
        """The lengths of the two parts of the vector: statistics, weights."""
        self._pass: tuple[list[Tensor], int] | None = None
        """The statistics of the current pass, a tensor for each dtype, and the number of its shards."""
        self._sums: list[Tensor] | None = None
        """What workers add, of the step's passes before it."""
        self._moved: tuple[list[Tensor], Sequence[Tensor], list[Tensor], Tensor] | None = None
        """What `undo` needs: counts, what was added to them, and running statistics with their values before."""
        self._constants: dict[tuple[str, int], tuple[Any, Tensor]] = {}
        """What was made of Python's numbers for so many shards, and of which: a GPU would have to wait for it in every
        step."""

    def begin_pass(self, shards: ShardRange) -> None:
        """Begin a pass that trains the model on these shards."""
        self.current.shards, self.current.is_noted = shards, True
        self.current.repeated = self._parameters.repeated(len(shards.sizes)) if shards.are_interleaved else {}
        if not self.layers:
            return
        self._end_pass()
        num_shards = len(shards.sizes)
        parts: list[Tensor] = []
        for dtype, same in groupby(self.layers, _dtype_of):
            layers = list(same)
            device = cast(Tensor, layers[0].running_mean).device
            widths = [num_shards * layer.num_features for layer in layers for _ in range(2)]
            values = torch.zeros(sum(widths), dtype=dtype, device=device)
            pieces = values.split(widths)
            for layer, mean, var in zip(layers, pieces[::2], pieces[1::2], strict=True):
                layer.seen = _Seen(mean, var, [0.0] * num_shards)
            parts.append(values)
        self._pass = parts, num_shards

    def _end_pass(self) -> None:
        """Add what was seen in the current pass, if there is one, to the sums of the step."""
        if self._pass is None:
            return
        parts, num_shards = self._pass
        values = parts[0] if len(parts) == 1 else torch.cat(parts)  # of the wider dtype
        weights = [[0.0] * num_shards if layer.seen is None else layer.seen.weights for layer in self.layers]
        factors = self._constant(("factors", num_shards), weights, lambda: self._of_values(_float64(weights).T), values)
        whole = self._constant(("weights", num_shards), weights, lambda: _float64(weights).sum(1), values)
        if num_shards == 1:
            values = values * factors.view(-1)
        else:
            order = self._constant(
                ("order", num_shards), None, lambda: shard_by_shard(self._widths, num_shards), values
            )
            values = (values[order] * factors).sum(0)
        sums = [values, whole]
        self._sums = sums if self._sums is None else list(torch._foreach_add(self._sums, sums))
        self._pass = None

    def _of_values(self, of_layers: Tensor) -> Tensor:
        """Repeat the number of each layer, in the last dimension, for its channels' means and variances."""
        return of_layers.repeat_interleave(torch.tensor(self._widths[::2]) * 2, dim=-1)

    def _constant(self, key: tuple[str, int], source: Any, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        """The tensor that was made of the same `source` before, or a new one; a floating one of the dtype of `like`.

        Args:
            key: what it is, and for how many shards.
        """
        if key not in self._constants or self._constants[key][0] != source:
            made = make()
            dtype = like.dtype if made.is_floating_point() else made.dtype
            self._constants[key] = source, on_device(made, like.device, dtype)
        return self._constants[key][1]

    def collect(self, like: Tensor) -> Iterator[Tensor]:
        """The vector since the last call, of the dtype of `like`; in parts, to be joined to others."""
        self._end_pass()
        if self.layers:
            for one in [like.new_zeros(sum(self.lengths))] if self._sums is None else self._sums:
                yield one.to(like.dtype)
        self._forget()

    @contextmanager
    def forgotten_after_error(self) -> Iterator[None]:
        """A context in which an error leaves no shards in the model, nor statistics that the next step would count."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget what was seen since the last `collect`."""
        self.end_pass()
        self._forget()

    def end_pass(self) -> None:
        """No shard is in the model any more."""
        self.current.shards = None
        self.current.repeated = {}

    def _forget(self) -> None:
        self._pass = self._sums = None
        for layer in self.layers:
            layer.seen = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context for backward passes, in which layers that run again (activation checkpointing) count nothing."""
        self.current.in_backward = True
        try:
            yield
        finally:
            self.current.in_backward = False

    def begin_step(self) -> None:
        """Take the present running statistics for those that `undo` restores."""
        self._moved = None

    @torch.no_grad()
    def undo(self) -> None:
        """Put the running statistics back as they were before this step's `apply`."""
        if self._moved is not None:
            counts, increments, running, before = self._moved
            torch._foreach_sub_(counts, list(increments))
            torch._foreach_copy_(running, before.split(self._widths))
            self._moved = None

    @torch.no_grad()
    def apply(self, values: Tensor, weights: Tensor) -> None:
        """Move the running statistics by what workers collected, if all of it is finite.

        Args:
            values, weights: the two parts of the vector, summed over all workers.
        """
        if not self.layers:
            return
        # Tensor arithmetic instead of an `if`: reading a number would make the CPU wait for the device.
        weights = weights.add(values.sum(), alpha=0)  # NaN, which is not above 0, if anything is not finite
        counts = [cast(Tensor, layer.num_batches_tracked) for layer in self.layers]
        increments = (weights > 0).to(counts[0].dtype).unbind()
        torch._foreach_add_(counts, increments)
        momenta = [math.nan if layer.momentum is None else layer.momentum for layer in self.layers]
        factors = self._constant(("momenta", 1), momenta, lambda: self._of_values(_float64(momenta)), values)
        of_layer = self._constant(("layers", 1), None, lambda: self._of_values(torch.arange(len(self.layers))), values)
        if any(layer.momentum is None for layer in self.layers):
            means = torch.stack(counts).clamp(min=1).to(values.dtype).reciprocal()
            factors = torch.where(factors.isnan(), means[of_layer], factors)
        weights = weights[of_layer]
        running = [cast(Tensor, one) for layer in self.layers for one in (layer.running_mean, layer.running_var)]
        exact = torch.cat(running)
        self._moved = counts, increments, running, exact
        before = exact.to(values.dtype)
        after = torch.where(weights > 0, before.lerp(values / weights, factors), before)
        torch._foreach_copy_(running, after.split(self._widths))


def _float64(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def has_other_norms(model: nn.Module) -> bool:
    """Whether there are batch norm layers whose statistics depend on all samples that go through them together."""
    return bool(_other_norms(model))


def _other_norms(model: nn.Module) -> list[_BatchNorm]:
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if not isinstance(layer, ShardBatchNorm)]


def can_mix_nothing(model: nn.Module) -> bool:
    """Whether in `mixing_nothing` no batch norm layer mixes samples: those that do have running statistics to use."""
    return all(isinstance(layer, SyncBatchNorm) and layer.track_running_stats for layer in _other_norms(model))


@contextmanager
def mixing_nothing(model: nn.Module) -> Iterator[None]:
    """A context in which synchronised layers normalise by their running statistics, and so wait for no other worker."""
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm) and layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def unknown_buffers(model: nn.Module) -> list[Tensor]:
    """All buffers, of any shape, but those of our norm layers, which keep theirs equal on all workers."""
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    known = {id(buffer) for layer in layers for buffer in layer._buffers.values()}
    return [buffer for buffer in model.buffers() if id(buffer) not in known]


def replace_batch_norm(model: nn.Module, kind: type[BatchNorm]) -> nn.Module:
    """Every batch norm layer of `model` as one of `kind`, holding the very same parameters and buffers.

    A layer that stands in several places still does. In place but for the model itself being such a layer, so use
    what is returned.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and not isinstance(layer, BatchNorm)]
    replacements: dict[nn.Module, nn.Module] = {layer: _replacement(layer, kind) for layer in layers}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children() would name a layer once only
            if child in replacements:
                setattr(module, name, replacements[child])
    return replacements.get(model, model)


def _replacement(original: _BatchNorm, kind: type[BatchNorm]) -> nn.Module:
    layer = kind(original.num_features, original.eps, original.momentum, False, original.track_running_stats)
    layer.affine = original.affine
    layer._parameters = original._parameters
    layer._buffers = original._buffers
    layer.training = original.training
    return layer


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """A context for a stand-in sample, which norm layers do not count.

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
