"""Buffers that forward passes change: moving averages, codebooks, the vectors of spectral norm.

Every virtual shard begins with the buffers of the step, whichever worker computes it, and a step ends with one value of
each for all workers:

    b + sum over shards s of n_s / n (b_s - b)    floating: the mean of the shards' values, weighted by samples
    b_0                                           any other, a counter: that of the global batch's first shard

with b the buffer before the step, b_s what shard s made of it and n_s its samples. What a forward pass leaves alone
does not change by a bit. Batch norm layers have rules of their own (`parallel.batch_norm.norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.dtensor_type import local_shard
from paceline.errors import ModelError
from paceline.parallel.assignment import ShardRange
from paceline.parallel.batch_norm.norm import NormStatistics, ShardBatchNorm
from paceline.parallel.kept.counters import Counters

_MOVE_TO_ZERO = 2.0**-900
"""Stands for the move to 0 of a value that was not finite, since a move of 0 is none; added to another number, it is
lost in rounding."""


class _Buffer:
    """A buffer and its value before the step."""

    def __init__(self, name: str, tensor: Tensor, *, is_combined: bool, is_persistent: bool) -> None:
        """
        Args:
            is_combined: whether its values are combined over shards; those of a batch norm layer are not.
            is_persistent: whether it is in the model's state_dict.
        """
        self.name = name
        self.is_combined = is_combined
        self.is_persistent = is_persistent
        self.holders: list[tuple[dict[str, Tensor | None], str]] = []
        """Where modules hold it: several if it is shared."""
        self.compares_values = True
        """Whether its values tell whether it was changed: `.data` lets a module write without autograd's notice. Those
        of all buffers do in the first step, then those of the ones that passes change."""
        self.tensor = tensor
        self.before = local_shard(tensor).clone()
        self._version = tensor._version

    @property
    def current(self) -> Tensor | None:
        """The tensor that the model holds now, in the buffer's shape."""
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
        return self.compares_values and not bool(_same(local_shard(self.tensor), self.before).all())

    def move_to(self, now: Tensor) -> Tensor:
        """The difference of a value from that before the step; where that is infinite, as of a minimum, from 0."""
        start = self.before.double()
        is_finite = start.isfinite()
        move = now.double() - start.where(is_finite, 0.0)
        move = move.where(is_finite | (move != 0), _MOVE_TO_ZERO)
        return move.where(~_same(now, self.before), 0.0)

    def add(self, move: Tensor) -> None:
        """Add a difference to the value before the step, if all of it is finite."""
        start = self.before.double()
        move = move.view(start.shape)
        is_finite = start.isfinite()
        to_zero = ~is_finite & (move.abs() <= _MOVE_TO_ZERO)
        moved = (start.where(is_finite, 0.0) + move.where(~to_zero, 0.0)).where(move != 0, start)
        self.set(moved.where(move.isfinite().all(), start))

    @torch.no_grad()
    def set(self, value: Tensor) -> None:
        """Hold a value in the tensor that the model held before the step."""
        for buffers, name in self.holders:
            buffers[name] = self.tensor
        local_shard(self.tensor).copy_(value)

    def restore(self) -> None:
        """Hold the value before the step again."""
        self.set(self.before)
        self._version = self.tensor._version


@dataclass(frozen=True)
class _Pass:
    """What a forward pass made of the buffers that it changed."""

    first_shard: int
    moves: Mapping[int, Tensor]
    """Weight times the difference from the step's value, in float64, by the number of each floating-point buffer."""
    values: Mapping[int, Tensor]
    """The value of every other buffer, by its number."""


class ForwardBuffers:
    """The buffers of a model that its forward passes may change, and what the passes of a step made of them."""

    def __init__(self, model: nn.Module, norm: NormStatistics) -> None:
        """
        Args:
            norm: moves the buffers of batch norm layers.
        """
        self._norm = norm
        self.counters = Counters.of_model(model)
        found: dict[int, _Buffer] = {}
        for path, module in model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is None or isinstance(module, ShardBatchNorm):
                    continue
                if id(tensor) not in found:
                    found[id(tensor)] = _Buffer(
                        f"{path}.{name}" if path else name,
                        tensor,
                        is_combined=not isinstance(module, _BatchNorm),
                        is_persistent=name not in module._non_persistent_buffers_set,
                    )
                found[id(tensor)].holders.append((module._buffers, name))
        self._all = list(found.values())
        self._combined = [buffer for buffer in self._all if buffer.is_combined]
        others = [buffer for buffer in self._all if not buffer.is_combined]
        dtypes = dict.fromkeys(buffer.tensor.dtype for buffer in others)
        self._of_norms = [[one for one in others if one.tensor.dtype == dtype] for dtype in dtypes]
        self._passes: list[_Pass] = []
        self._moving: set[int] = set()
        """The numbers of the buffers that passes have changed so far."""
        self._told: set[str] = set()
        """The names of the buffers and numbers of which the user has been told that passes change them."""

    def __len__(self) -> int:
        """The number of those that are combined over shards."""
        return len(self._combined)

    # --- the passes of a step ---

    @torch.no_grad()
    def begin_step(self) -> None:
        """Take the present values for those that every pass of this step begins with."""
        self.counters.begin_step()
        for buffer in self._all:
            buffer.remember()
        for same in self._of_norms:  # the kernels of batch norm write without autograd's notice
            torch._foreach_copy_([one.before for one in same], [local_shard(one.tensor) for one in same])
        self._norm.begin_step()
        self._passes = []

    def begin_pass(self) -> None:
        """Give the buffers that another pass changed their values before the step."""
        self.counters.begin_pass()
        _restore(self._combined)

    def start_over(self) -> None:
        """Have the model hold the buffers before the step again, and forget its passes."""
        self.counters.restore()
        _restore(self._all)
        self._norm.undo()
        self._passes = []

    def end_forward(self, shards: ShardRange) -> bool:
        """Note what a forward pass made of the buffers; returns whether it changed any.

        Raises:
            ModelError: a buffer has another shape now.
        """
        moves: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for number, buffer in enumerate(self._combined):
            if not buffer.is_changed():
                continue
            now = buffer.current
            if now is None or (now.shape, now.dtype) != (buffer.tensor.shape, buffer.tensor.dtype):
                raise ModelError(
                    f"A forward pass gave the buffer '{buffer.name}' another shape or type, so its values for the "
                    "virtual shards of a batch cannot be combined; create it as it stays before run.prepare."
                )
            if now.is_floating_point():
                moves[number] = buffer.move_to(local_shard(now)) * shards.weight
            else:
                values[number] = local_shard(now).clone()
        if moves or values:
            self._passes.append(_Pass(shards.first_shard, moves, values))
        return bool(moves or values)

    def changed(self, like: Tensor) -> Iterator[Tensor]:
        """A vector, unless there are no buffers: for each 1 if passes of this step changed it on this worker, else 0;
        to be added up over workers."""
        if self._combined:
            changed = like.new_zeros(len(self._combined))
            for number in sorted({number for one in self._passes for number in (*one.moves, *one.values)}):
                changed[number] = 1.0
            yield changed

    # --- the end of a step ---

    @torch.no_grad()
    def combine(
        self, changed: Tensor, sum_moves: Callable[[list[int]], Tensor], broadcast: Callable[[list[Tensor]], object]
    ) -> None:
        """Set the buffers of all workers to what the step's passes made of them; a collective if these changed any.

        Args:
            changed: [num_buffers], the sum of `changed` over workers.
            sum_moves: returns the sum over workers of the `moves` of the buffers with these numbers, 1-D.
            broadcast: gives all workers the tensors of the one that has the global batch's first shard.
        """
        if not self._combined:
            return
        _restore(self._combined)
        numbers = [number for number, count in enumerate(changed.tolist()) if count]
        self._have_moved(numbers)
        floating = [number for number in numbers if self._combined[number].tensor.is_floating_point()]
        others = [number for number in numbers if number not in floating]
        if floating:
            total = sum_moves(floating)
            sizes = [self._combined[number].before.numel() for number in floating]
            for number, move in zip(floating, total.split(sizes), strict=True):
                self._combined[number].add(move)
        if others:
            for number in others:
                for one in self._passes:
                    if one.first_shard == 0 and number in one.values:
                        self._combined[number].set(one.values[number])
            broadcast([local_shard(self._combined[number].tensor) for number in others])

    def moves(self, numbers: Sequence[int], first_shard: int | None = None) -> Tensor:
        """What the passes of this worker, or the one that begins with a shard, moved some buffers by: a flat vector."""
        moves = []
        for number in numbers:
            total = torch.zeros_like(self._combined[number].before, dtype=torch.float64)
            for one in self._passes:
                if number in one.moves and first_shard in (None, one.first_shard):
                    total += one.moves[number]
            moves.append(total.reshape(-1))
        return torch.cat(moves)

    def let_stand(self) -> None:
        """Keep what passes have made of this worker's buffers, where no other worker's are combined with them."""
        self._have_moved({number for one in self._passes for number in (*one.moves, *one.values)})
        self.counters.let_stand()
        self.begin_step()

    def _have_moved(self, numbers: Iterable[int]) -> None:
        self._moving.update(numbers)
        for number, buffer in enumerate(self._combined):
            buffer.compares_values = number in self._moving

    def changed_now(self) -> str | None:
        """The name of a buffer that is not as before the step; None if all are."""
        return next((buffer.name for buffer in self._combined if buffer.is_changed()), None)

    # --- between steps ---

    def newly_moving(self) -> list[str]:
        """The names of the buffers that forward passes have begun to change since the last call."""
        return self._untold(self._combined[number].name for number in sorted(self._moving))

    def newly_counting(self) -> list[str]:
        """The paths of the numbers in attributes that forward passes have begun to change since the last call."""
        return self._untold(self.counters.state())

    def _untold(self, names: Iterable[str]) -> list[str]:
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        return new

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
        moving = (self._combined[number] for number in sorted(self._moving))
        return {buffer.name: local_shard(buffer.tensor) for buffer in moving if not buffer.is_persistent}

    def load_hidden_state(self, state: Mapping[str, Tensor]) -> None:
        for buffer in self._combined:
            if buffer.name in state:
                buffer.set(state[buffer.name])


@contextmanager
def looking_at(model: nn.Module) -> Iterator[list[str]]:
    """A context for looking at a model, by passes or by tracing it; its buffers are afterwards as before.

    Yields the names of those that were changed, known at the end; batch norm layers' are not among them.
    """
    known = [
        (f"{path}.{name}" if path else name, module._buffers, name, tensor, tensor._version, tensor.clone())
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and not isinstance(module, _BatchNorm)
    ]
    written: list[str] = []
    yield written
    for whole_name, holder, name, tensor, version, before in known:
        now: object = holder.get(name)
        if now is None:  # cut off with the layers of another stage
            now = tensor
        # Another tensor may be the same one moved to another device; anything else was put there by a tracer.
        is_replaced = not isinstance(now, Tensor) or (now is not tensor and now.device == tensor.device)
        if is_replaced or tensor._version != version:
            written.append(whole_name)
            with torch.no_grad():
                tensor.copy_(before)
        if is_replaced:
            holder[name] = tensor


def refused_in_pipeline(name: str) -> ModelError:
    """The error for a model whose forward passes change this buffer."""
    return ModelError(
        f"Forward passes change buffers ({name}), but in a pipeline several micro-batches are under way at once and "
        "cannot all begin with those of the step; use dp, fsdp or tp."
    )


def _restore(buffers: Iterable[_Buffer]) -> None:
    for buffer in buffers:
        if buffer.is_changed():
            buffer.restore()


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors have the same values, NaN or not."""
    return (one == other) | ((one != one) & (other != other))
