"""The buffers of a model: one rule for all of them, the running statistics of batch norm included.

Every virtual shard begins with the buffers of the step, whichever worker computes it, and a step ends with one value of
each for all workers:

    b + sum over shards s of n_s / n (b_s - b)    floating: the mean of the shards' values, weighted by samples
    b_0                                           any other, such as a counter: that of the global batch's first shard

with b the buffer before the step, b_s what the forward pass of shard s made of it and n_s its samples. What shards make
of buffers is taken before their backward pass, in which activation checkpointing may run layers again. Where a value is
not finite nothing moves.

Most buffers never move. Those of batch norm layers do; which of the others do is seen in a run's first steps. The ones
that move lie in one flat tensor of each dtype, so that a pass costs a few operations however many layers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.dtensor_type import is_dtensor
from paceline.errors import ModelError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_WATCHED_STEPS = 2
"""In so many steps all buffers are compared before and after every pass; what has not moved by then is a constant."""

_MOST_WATCHED_BYTES = 1 << 26
"""Larger buffers are constants, as quantised weights are."""


@dataclass(frozen=True)
class _Buffer:
    name: str
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that hold it, and its attribute there; several if modules share it."""

    @property
    def now(self) -> Tensor:
        """
        Raises:
            ModelError: a forward pass has removed it.
        """
        module, attribute = self.places[0]
        value = getattr(module, attribute)
        if not isinstance(value, Tensor):
            raise _other_form(self.name)
        return value

    def hold(self, tensor: Tensor) -> None:
        """Have the modules hold this tensor."""
        for module, attribute in self.places:
            setattr(module, attribute, tensor)


class _Flat:
    """Buffers of one dtype and device that move: views of a flat vector, which modules hold."""

    def __init__(self, buffers: Sequence[_Buffer]) -> None:
        self.buffers = buffers
        tensors = [buffer.now.detach() for buffer in buffers]
        self.values = torch.cat([tensor.reshape(-1) for tensor in tensors])
        pieces = self.values.split([tensor.numel() for tensor in tensors])
        self._views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        for buffer, view in zip(buffers, self._views, strict=True):
            buffer.hold(view)
        self.before = self.values.clone()
        self._start = _start(self.before)
        self.moves: Tensor | None = None
        """The sum of the shards' moves since they were last collected."""

    def gather(self) -> None:
        """Take the values of tensors that modules have put in the place of ours.

        Raises:
            ModelError: one has another shape or type.
        """
        for buffer, view in zip(self.buffers, self._views, strict=True):
            for module, attribute in buffer.places:
                now = getattr(module, attribute)
                if now is not view:
                    if not isinstance(now, Tensor) or (now.shape, now.dtype) != (view.shape, view.dtype):
                        raise _other_form(buffer.name)
                    view.data.copy_(now.detach())
                    setattr(module, attribute, view)

    def begin_step(self) -> None:
        self.gather()
        self.before.copy_(self.values)
        self._start = _start(self.before)
        self.moves = None

    def restore(self) -> None:
        # By .data: in a pipeline another shard's backward pass is still to come, with what its forward pass has saved.
        self.values.data.copy_(self.before)

    def end_pass(self, shard: int, weight: float) -> None:
        self.gather()
        move = _move(self._start, self.values, shard, weight)
        if move is not None:
            self.moves = move if self.moves is None else self.moves + move

    def apply(self, move: Tensor) -> None:
        self.values.data.copy_(_moved(self.before, move))


def _start(before: Tensor) -> Tensor:
    """From where moves are counted: the value before the step, 0 where that is not finite, as of a minimum."""
    return before.nan_to_num(0.0, 0.0, 0.0) if before.is_floating_point() else before.long()


def _move(start: Tensor, now: Tensor, shard: int, weight: float) -> Tensor | None:
    """What a shard adds to the move of some buffers; None: nothing."""
    if now.is_floating_point():
        return (now - start) * weight
    return now.long() - start if shard == 0 else None


def _moved(before: Tensor, move: Tensor) -> Tensor:
    """Buffers after the sum of all moves; as before where a value would no longer be finite."""
    if not before.is_floating_point():
        return (_start(before) + move.nan_to_num(0.0, 0.0, 0.0).round().long()).to(before.dtype)
    moved = _start(before) + move.to(before.dtype)
    return moved.where((moved.isfinite() | ~before.isfinite()).all(), before)


@dataclass
class _Watched:
    """A buffer of which it is not known yet whether it moves."""

    buffer: _Buffer
    tensor: Tensor
    before: Tensor
    is_changed: bool = False
    """By the last pass."""
    moves: dict[int, Tensor] = field(default_factory=dict)
    """What the pass of each shard has moved it by, flat."""

    def look(self, shard: int, weight: float) -> None:
        now = self.buffer.now
        self.is_changed = now is not self.tensor or not torch.equal(now, self.before)
        if self.is_changed:
            if (now.shape, now.dtype) != (self.before.shape, self.before.dtype):
                raise _other_form(self.buffer.name)
            move = _move(_start(self.before), now, shard, weight)
            if move is not None:
                self.moves[shard] = move.reshape(-1)

    def restore(self) -> None:
        if self.is_changed:
            self.buffer.hold(self.tensor)
            self.tensor.data.copy_(self.before)
            self.is_changed = False


class Buffers:
    """The buffers of a model that its forward passes may change, and what the shards of a step made of them."""

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, _Buffer] = {}
        moving: dict[str, _Buffer] = {}
        for path, module in model.named_modules():
            for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
                name = f"{path}.{attribute}" if path else attribute
                known = found.get(id(tensor), _Buffer(name, ()))
                found[id(tensor)] = buffer = _Buffer(known.name, (*known.places, (module, attribute)))
                if isinstance(module, BATCH_NORMS) or buffer.name in moving:
                    moving[buffer.name] = buffer
        self._model = model
        self._others = [buffer for buffer in found.values() if buffer.name not in moving]
        self._flats: list[_Flat] = []
        self._let_move(list(moving.values()))
        self._watched: list[_Watched] = []
        self._num_steps = 0
        self._is_clean = True
        """Whether no pass has been made since the buffers had the step's values."""

    def _let_move(self, moving: Sequence[_Buffer]) -> list[_Flat]:
        kinds: dict[tuple[torch.dtype, torch.device], list[_Buffer]] = {}
        for buffer in moving:
            kinds.setdefault((buffer.now.dtype, buffer.now.device), []).append(buffer)
        flats = [_Flat(alike) for alike in kinds.values()]
        self._flats += flats
        return flats

    @property
    def num_sums(self) -> int:
        """The length of what `collect` returns."""
        return sum(len(flat.values) for flat in self._flats) + len(self._watched)

    # --- the passes of a step ---

    @torch.no_grad()
    def begin_step(self) -> None:
        """Take the present values for those that every pass of this step begins with."""
        for flat in self._flats:
            flat.begin_step()
        self._watched = []
        if self._num_steps < _WATCHED_STEPS:
            for buffer in self._others:
                tensor = buffer.now
                if not is_dtensor(tensor) and tensor.nbytes <= _MOST_WATCHED_BYTES and not tensor.is_complex():
                    self._watched.append(_Watched(buffer, tensor, tensor.detach().clone()))
        self._num_steps += 1
        self._is_clean = True

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Give all buffers their values before the step."""
        if not self._is_clean:
            for flat in self._flats:
                flat.restore()
            for watched in self._watched:
                watched.restore()
        self._is_clean = False

    def start_over(self) -> None:
        """As `begin_pass`, and forget the passes of the step."""
        self.begin_pass()
        for flat in self._flats:
            flat.moves = None
        for watched in self._watched:
            watched.moves.clear()

    @torch.no_grad()
    def end_pass(self, shard: int, weight: float) -> None:
        """Note what the forward pass of a shard made of the buffers.

        Args:
            weight: the part of the global batch that the shard is.

        Raises:
            ModelError: a buffer has another shape now.
        """
        for flat in self._flats:
            flat.end_pass(shard, weight)
        for watched in self._watched:
            watched.look(shard, weight)

    def collect(self, like: Tensor) -> Tensor:
        """What workers add up: what passes since the last call have moved buffers by, and of each watched one whether
        it has moved. A vector of the dtype and on the device of `like`."""
        found = []
        for flat in self._flats:
            found.append(like.new_zeros(len(flat.values)) if flat.moves is None else flat.moves.to(like))
            flat.moves = None
        if self._watched:
            found.append(like.new_tensor([float(bool(watched.moves)) for watched in self._watched]))
        return torch.cat(found) if found else like.new_zeros(0)

    # --- the end of a step ---

    @torch.no_grad()
    def end_step(self, sums: Tensor, sum_moves: Callable[[Callable[[int | None], Tensor]], Tensor]) -> None:
        """Set the buffers of all workers to what the step's passes made of them.

        Args:
            sums: [num_sums], the sum of `collect` over workers.
            sum_moves: returns the sum over workers of a vector; called with a function that returns this worker's, or
                that of one shard, where a watched buffer has moved: a collective.
        """
        self.apply(sums)
        if not self._watched:
            return
        moves_per_buffer = sums[-len(self._watched) :].tolist()
        moved = [watched for watched, num in zip(self._watched, moves_per_buffer, strict=True) if num]
        for watched in self._watched:
            watched.restore()
        if moved:

            def of_shard(shard: int | None) -> Tensor:
                return torch.cat([_sum_of(one, shard) for one in moved])

            total = sum_moves(of_shard)
            sizes = [watched.before.numel() for watched in moved]
            moves = {one.buffer.name: move for one, move in zip(moved, total.split(sizes), strict=True)}
            self._others = [buffer for buffer in self._others if buffer.name not in moves]
            for flat in self._let_move([watched.buffer for watched in moved]):
                flat.apply(torch.cat([moves[buffer.name] for buffer in flat.buffers]))
        self._watched = []

    @torch.no_grad()
    def apply(self, sums: Tensor) -> None:
        """As `end_step`, of the buffers that are known to move."""
        if not self._flats:
            return
        lengths = [len(flat.values) for flat in self._flats]
        for flat, move in zip(self._flats, sums[: sum(lengths)].split(lengths), strict=True):
            flat.apply(move)

    @torch.no_grad()
    def let_stand(self) -> None:
        """Keep what passes have made of this worker's watched buffers, where no other worker's are combined with them;
        those that are known to move wait for `apply`."""
        for flat in self._flats:
            flat.restore()
        self._watched = []

    def watch_nothing(self) -> None:
        """Let those buffers move that are known to, and no others: what `collect` returns keeps its length."""
        self._num_steps = _WATCHED_STEPS

    # --- copies of the model on other devices ---

    def follow(self, other: Buffers) -> None:
        """Let those buffers move that are known to move in a copy of the model."""
        names = {buffer.name for flat in other._flats for buffer in flat.buffers}
        moving = [buffer for buffer in self._others if buffer.name in names]
        self._others = [buffer for buffer in self._others if buffer.name not in names]
        if moving:
            self._let_move(moving)

    def take_moves(self, other: Buffers) -> None:
        """Take what passes of a copy of the model have moved watched buffers by."""
        for mine, theirs in zip(self._watched, other._watched, strict=True):
            mine.moves |= {shard: move.to(mine.before.device) for shard, move in theirs.moves.items()}

    # --- between steps ---

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A context after which all buffers are as before it: an evaluation teaches nothing."""
        with buffers_kept(self._model):
            yield
        for flat in self._flats:
            flat.gather()

    def hidden_state(self) -> dict[str, Tensor]:
        """The buffers, of any shapes, that passes change and a state_dict leaves out: a resumed run needs them too."""
        moving = [buffer for flat in self._flats for buffer in flat.buffers]
        if not moving:
            return {}
        saved = self._model.state_dict().keys()
        return {buffer.name: buffer.now for buffer in moving if buffer.name not in saved}

    @torch.no_grad()
    def load_hidden_state(self, state: Mapping[str, Tensor]) -> None:
        for name, module_buffer in self._model.named_buffers():
            if name in state:
                module_buffer.copy_(state[name])


def _sum_of(watched: _Watched, shard: int | None) -> Tensor:
    """What this worker's passes, or that of one shard, moved a buffer by, flat, in float64."""
    total = torch.zeros(watched.before.numel(), dtype=torch.float64, device=watched.before.device)
    for number, move in watched.moves.items():
        if shard in (None, number):
            total += move
    return total


def _other_form(name: str) -> ModelError:
    return ModelError(
        f"A forward pass gave the buffer '{name}' another shape or type, so its values for the virtual shards of a "
        "batch cannot be combined; create it as it stays before run.prepare."
    )


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """A context for a stand-in sample, which may be a single one: batch norm layers do not normalise over it.

    Only they are switched: a model may use other parameters, and have other outputs, in evaluation mode.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, BATCH_NORMS) and layer.training]
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
        if isinstance(layer, BATCH_NORMS) and layer.running_mean is not None:
            layer.register_forward_pre_hook(_rest_on_single_value)
            layer.register_forward_hook(_work_again, always_call=True)


def _rest_on_single_value(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if layer.training and inputs[0].numel() == inputs[0].shape[1]:
        layer.training, layer.rests_once = False, True  # type: ignore[assignment]


def _work_again(layer: nn.Module, _inputs: object, _output: object) -> None:
    if vars(layer).pop("rests_once", False):
        layer.training = True


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """A context for passes, or tracing, that leave no trace: all buffers are afterwards as before it."""
    known = [
        (module, attribute, tensor, tensor.detach().clone())
        for module in model.modules()
        for attribute, tensor in module.named_buffers(recurse=False)
        if not tensor.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, attribute, tensor, before in known:
                if hasattr(module, attribute):  # else cut off with the layers of another stage
                    if getattr(module, attribute) is not tensor:
                        setattr(module, attribute, tensor)
                    tensor.data.copy_(before)
