"""The buffers of a model: one rule for all of them, the running statistics of batch norm included.

Every virtual shard begins with the buffers of the step, whichever worker computes it, and a step ends with one value of
each for all workers:

    b + sum over shards s of n_s / n (b_s - b)    floating: the mean of the shards' values, weighted by samples
    b_0                                           any other, such as a counter: that of the global batch's first shard

with b the buffer before the step, b_s what the forward pass of shard s made of it and n_s its samples. What shards make
of buffers is taken before their backward pass, in which activation checkpointing may run layers again. Where a value is
not finite nothing moves.

What batch norm layers move is summed together with the loss. Other buffers may be large, and most never move: workers
add up which of them have, and then what these have moved by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.dtensor_type import local_shard
from paceline.errors import ModelError


class _Buffer:
    """A buffer, where modules hold it, and its value before the step."""

    def __init__(self, name: str, tensor: Tensor, *, is_persistent: bool) -> None:
        """
        Args:
            is_persistent: whether it is in the model's state_dict.
        """
        self.name = name
        self.is_persistent = is_persistent
        self.holders: list[tuple[dict[str, Tensor | None], str]] = []
        """Several if modules share it."""
        self.compares_values = True
        """Whether its values tell whether it was changed: `.data` lets a module write without autograd's notice. Those
        of all buffers do in the first step, then those of the ones that passes change."""
        self.tensor = tensor
        self.before = local_shard(tensor).clone()
        self._version = tensor._version

    @property
    def current(self) -> Tensor | None:
        """The tensor that the model holds now."""
        buffers, name = self.holders[0]
        return buffers[name]

    @property
    def _is_touched(self) -> bool:
        return self.current is not self.tensor or self.tensor._version != self._version

    def remember(self) -> None:
        """Take the present value for that before the step."""
        current = self.current
        if current is not None and self._is_touched:
            self.tensor = current
            self.before = local_shard(current).clone()
            self._version = current._version

    def is_changed(self) -> bool:
        if self._is_touched:
            return True
        now, before = local_shard(self.tensor), self.before
        return self.compares_values and not bool(((now == before) | ((now != now) & (before != before))).all())

    @property
    def _start(self) -> Tensor:
        """The value before the step; 0 where that is not finite, as of a minimum."""
        start = self.before.double()
        return start.where(start.isfinite(), 0.0)

    def move_to(self, now: Tensor) -> Tensor:
        """The difference of a value from that before the step."""
        return now.double() - self._start

    def add(self, move: Tensor) -> None:
        """Add a difference to the value before the step, unless that makes a value not finite which was."""
        moved = self._start + move.view(self.before.shape)
        is_good = (moved.isfinite() | ~self.before.isfinite()).all()
        self.set(moved.where(is_good, self.before.double()))

    @torch.no_grad()
    def set(self, value: Tensor) -> None:
        """Hold a value in the tensor that the model held before the step."""
        for buffers, name in self.holders:
            buffers[name] = self.tensor
        local_shard(self.tensor).copy_(value)

    def restore(self) -> None:
        """Hold the value before the step again."""
        if self.is_changed():
            self.set(self.before)
            self._version = self.tensor._version


@dataclass(frozen=True)
class _Pass:
    """What a shard's forward pass made of the buffers that it changed, but for those of batch norm layers."""

    shard: int
    moves: Mapping[int, Tensor]
    """Weight times the difference from the step's value, in float64, by the number of each floating-point buffer."""
    values: Mapping[int, Tensor]
    """The value of every other buffer, by its number."""


class _NormBuffers:
    """The running statistics of all batch norm layers, as one flat vector, and the layers' counts of batches.

    Their kernels write without autograd's notice, so they are looked at in every pass. This class does so too, by
    `.data`: in a pipeline another shard's backward pass is still to come, with what its forward pass has saved.
    """

    def __init__(self, layers: Sequence[_BatchNorm]) -> None:
        self._layers = layers
        self._sizes = [layer.num_features for layer in layers for _ in range(2)]
        self.lengths = sum(self._sizes), len(layers)
        """The lengths of the parts of what is summed: moves of the statistics, moves of the counts."""
        self._sums: tuple[Tensor, Tensor] | None = None
        if layers:
            self.begin_step()

    def _now(self) -> tuple[list[Tensor], list[Tensor]]:
        every = [layer._buffers for layer in self._layers]
        running = [one[name] for one in every for name in ("running_mean", "running_var")]
        counts = [one["num_batches_tracked"] for one in every]
        statistics = [local_shard(one.data) for one in running if one is not None]
        return statistics, [one.data for one in counts if one is not None]

    def begin_step(self) -> None:
        statistics, counts = self._now()
        self._before = torch.cat(statistics), torch.stack(counts)
        self._sums = None

    def restore(self) -> None:
        self._set(*self._before)

    def _set(self, statistics: Tensor, counts: Tensor) -> None:
        running, now = self._now()
        torch._foreach_copy_(running, list(statistics.split(self._sizes)))
        torch._foreach_copy_(now, list(counts.unbind()))

    def end_forward(self, shard: int, weight: float) -> None:
        statistics, counts = self._now()
        moves = (torch.cat(statistics) - self._before[0]) * weight
        counted = (torch.stack(counts) - self._before[1]) * (shard == 0)
        sums = self._sums
        self._sums = (moves, counted) if sums is None else (sums[0] + moves, sums[1] + counted)

    def collect(self, like: Tensor) -> Tensor:
        found, self._sums = self._sums, None
        return like.new_zeros(sum(self.lengths)) if found is None else torch.cat([one.to(like) for one in found])

    def move(self, statistics: Tensor, counts: Tensor) -> None:
        is_finite = statistics.isfinite().all()
        before, counted = self._before
        moved = before.to(statistics) + statistics.where(is_finite, 0.0)
        self._set(moved.to(before.dtype), counted + counts.where(is_finite, 0.0).to(counted.dtype))


class Buffers:
    """The buffers of a model that its forward passes may change, and what the shards of a step made of them."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and _keeps_statistics(module)]
        self._norms = _NormBuffers(layers)
        of_norms = {id(buffer) for layer in layers for buffer in layer.buffers()}
        found: dict[int, _Buffer] = {}
        for path, module in model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is None or id(tensor) in of_norms:
                    continue
                if id(tensor) not in found:
                    is_persistent = name not in module._non_persistent_buffers_set
                    whole_name = f"{path}.{name}" if path else name
                    found[id(tensor)] = _Buffer(whole_name, tensor, is_persistent=is_persistent)
                found[id(tensor)].holders.append((module._buffers, name))
        self._others = list(found.values())
        self._passes: list[_Pass] = []
        self._moving: set[int] = set()
        """The numbers of the buffers that passes have changed so far."""
        self.num_sums = sum(self._norms.lengths) + len(self._others)
        """The length of what `collect` returns."""

    # --- the passes of a step ---

    @torch.no_grad()
    def begin_step(self) -> None:
        """Take the present values for those that every pass of this step begins with."""
        for buffer in self._others:
            buffer.remember()
        if self._norms.lengths[1]:
            self._norms.begin_step()
        self._passes = []

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Give all buffers their values before the step."""
        for buffer in self._others:
            buffer.restore()
        if self._norms.lengths[1]:
            self._norms.restore()

    def start_over(self) -> None:
        """As `begin_pass`, and forget the passes of the step."""
        self.begin_pass()
        self._passes = []

    @torch.no_grad()
    def end_forward(self, shard: int, weight: float) -> None:
        """Note what the forward pass of a shard made of the buffers.

        Args:
            weight: the part of the global batch that the shard is.

        Raises:
            ModelError: a buffer has another shape now.
        """
        if self._norms.lengths[1]:
            self._norms.end_forward(shard, weight)
        moves: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for number, buffer in enumerate(self._others):
            if not buffer.is_changed():
                continue
            now = buffer.current
            if now is None or (now.shape, now.dtype) != (buffer.tensor.shape, buffer.tensor.dtype):
                raise ModelError(
                    f"A forward pass gave the buffer '{buffer.name}' another shape or type, so its values for the "
                    "virtual shards of a batch cannot be combined; create it as it stays before run.prepare."
                )
            if now.is_floating_point():
                moves[number] = buffer.move_to(local_shard(now)) * weight
            else:
                values[number] = local_shard(now).clone()
        if moves or values:
            self._passes.append(_Pass(shard, moves, values))

    def collect(self, like: Tensor) -> Tensor:
        """What workers add up: what passes since the last call have moved batch norm layers by, and for each other
        buffer 1 if they have changed it. A vector of the dtype and on the device of `like`."""
        changed = like.new_zeros(len(self._others))
        for number in sorted({number for one in self._passes for number in (*one.moves, *one.values)}):
            changed[number] = 1.0
        return torch.cat([self._norms.collect(like), changed])

    # --- the end of a step ---

    @torch.no_grad()
    def combine(
        self, sums: Tensor, sum_moves: Callable[[list[int]], Tensor], broadcast: Callable[[list[Tensor]], object]
    ) -> None:
        """Set the buffers of all workers to what the step's passes made of them; a collective if these changed any but
        those of batch norm layers.

        Args:
            sums: [num_sums], the sum of `collect` over workers.
            sum_moves: returns the sum over workers of the `moves` of the buffers with these numbers, 1-D.
            broadcast: gives all workers the tensors of the one that has the global batch's first shard.
        """
        statistics, counts, changed = sums.split([*self._norms.lengths, len(self._others)])
        if len(counts):
            self._norms.move(statistics, counts)
        if not self._others:
            return
        for buffer in self._others:
            buffer.restore()
        numbers = [number for number, count in enumerate(changed.tolist()) if count > 0]
        self._have_moved(numbers)
        floating = [number for number in numbers if self._others[number].tensor.is_floating_point()]
        others = [number for number in numbers if number not in floating]
        if floating:
            total = sum_moves(floating)
            sizes = [self._others[number].before.numel() for number in floating]
            for number, move in zip(floating, total.split(sizes), strict=True):
                self._others[number].add(move)
        if others:
            for one in self._passes:
                for number in others if one.shard == 0 else ():
                    if number in one.values:
                        self._others[number].set(one.values[number])
            broadcast([local_shard(self._others[number].tensor) for number in others])

    def moves(self, numbers: Sequence[int], shard: int | None = None) -> Tensor:
        """What the passes of this worker, or that of one shard, moved some buffers by: a flat vector."""
        moves = []
        for number in numbers:
            total = torch.zeros_like(self._others[number].before, dtype=torch.float64)
            for one in self._passes:
                if number in one.moves and shard in (None, one.shard):
                    total += one.moves[number]
            moves.append(total.reshape(-1))
        return torch.cat(moves)

    def move_norms(self, sums: Tensor) -> None:
        """As `combine`, of batch norm layers alone."""
        statistics, counts, _ = sums.split([*self._norms.lengths, len(self._others)])
        if len(counts):
            with torch.no_grad():
                self._norms.move(statistics, counts)

    def let_stand(self) -> None:
        """Keep what passes have made of this worker's buffers, where no other worker's are combined with them; those of
        batch norm layers wait for `move_norms`."""
        self._have_moved({number for one in self._passes for number in (*one.moves, *one.values)})
        if self._norms.lengths[1]:
            with torch.no_grad():
                self._norms.restore()
        self.begin_step()

    def _have_moved(self, numbers: Sequence[int] | set[int]) -> None:
        self._moving.update(numbers)
        for number, buffer in enumerate(self._others):
            buffer.compares_values = number in self._moving

    # --- between steps ---

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A context after which all buffers are as before it: an evaluation teaches nothing."""
        self.begin_step()
        try:
            yield
        finally:
            self.start_over()

    def hidden_state(self) -> dict[str, Tensor]:
        """The buffers, of any shapes, that passes change and a state_dict leaves out: a resumed run needs them too."""
        moving = (self._others[number] for number in sorted(self._moving))
        return {buffer.name: local_shard(buffer.tensor) for buffer in moving if not buffer.is_persistent}

    def load_hidden_state(self, state: Mapping[str, Tensor]) -> None:
        for buffer in self._others:
            if buffer.name in state:
                buffer.set(state[buffer.name])


def _keeps_statistics(layer: _BatchNorm) -> bool:
    return layer.running_mean is not None and layer.num_batches_tracked is not None


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """A context for a stand-in sample, which may be a single one: batch norm layers do not normalise over it.

    Only they are switched: a model may use other parameters, and have other outputs, in evaluation mode.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def accept_single_values(model: nn.Module) -> None:
    """Have batch norm layers use their running statistics, and leave them alone, where a virtual shard has a single
    value for each channel, as one sample of a short batch has: torch refuses to normalise over it."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and _keeps_statistics(layer):
            layer.register_forward_pre_hook(_rest_on_single_value)
            layer.register_forward_hook(_work_again, always_call=True)


def _rest_on_single_value(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if layer.training and inputs[0].numel() == inputs[0].shape[1]:
        layer.training, layer.rests_once = False, True  # type: ignore[assignment]


def _work_again(layer: nn.Module, _inputs: object, _output: object) -> None:
    if vars(layer).pop("rests_once", False):
        layer.training = True


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[list[str]]:
    """A context for passes, or tracing, that leave no trace: all buffers are afterwards as before it.

    Yields the names of those that were changed, known at the end; batch norm layers' are not among them.
    """
    known = [
        (f"{path}.{name}" if path else name, module, name, tensor, tensor._version, tensor.clone())
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    written: list[str] = []
    yield written
    for whole_name, module, name, tensor, version, before in known:
        now: object = module._buffers.get(name)
        if now is None:  # cut off with the layers of another stage
            now = tensor
        # Another tensor may be the same one moved to another device; anything else was put there by a tracer.
        is_replaced = not isinstance(now, Tensor) or (now is not tensor and now.device == tensor.device)
        is_norm = isinstance(module, _BatchNorm)
        if is_replaced or tensor._version != version or is_norm:
            with torch.no_grad():
                tensor.copy_(before)
            if not is_norm:
                written.append(whole_name)
        if is_replaced:
            module._buffers[name] = tensor


def refused_in_pipeline(name: str) -> ModelError:
    """The error for a model whose forward passes change this buffer."""
    return ModelError(
        f"Forward passes change buffers ({name}), which a pipeline cannot combine over virtual shards unless they are "
        "of batch norm layers; use dp, fsdp or tp."
    )
