"""The buffers of a model: one rule for all of them, the running statistics of batch norm included.

Every virtual shard begins with the buffers of the step, whichever worker computes it, and a step ends with one value of
each for all workers:

    b + sum over shards s of n_s / n (b_s - b)    floating: the mean of the shards' values, weighted by samples
    b_0                                           any other, such as a counter: that of the global batch's first shard

with b the buffer before the step, b_s what the forward pass of shard s made of it and n_s its samples. What shards make
of buffers is taken before their backward pass, in which activation checkpointing may run layers again. Where a value is
not finite nothing moves.

Most buffers never move. Those of batch norm layers do; which of the others do is seen in a run's first steps, and later
in the steps that are audited. The ones that move lie in one flat tensor of each dtype, so that a pass costs a few
operations however many layers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.errors import ModelError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_NUM_FIRST_STEPS = 2
"""What has not moved in so many steps is a constant."""

_MOST_BYTES, _MOST_BOOLS = 1 << 26, 1 << 16
"""Larger buffers are constants, as quantised weights and masks are."""

_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Buffers of other types are constants."""


Places = Sequence[tuple[nn.Module, str]]
"""The modules that hold a buffer, and its attribute there; several if modules share it."""


class _Flat:
    """Buffers of one dtype and device: views of a flat vector, which modules hold."""

    def __init__(self, places: Mapping[str, Places]) -> None:
        """
        Args:
            places: of each buffer, by its name.
        """
        self._places = places
        now = [_tensor_at(several) for several in places.values()]
        self.values = torch.cat([tensor.detach().reshape(-1) for tensor in now])
        pieces = self.values.split([tensor.numel() for tensor in now])
        self._views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, now, strict=True)]
        for several, view in zip(places.values(), self._views, strict=True):
            _hold(several, view)
        self._before = self.values.clone()
        self.begin_step()

    def gather(self) -> None:
        """Take the values of tensors that modules have put in the place of ours.

        Raises:
            ModelError: one has another shape or type.
        """
        for (name, places), view in zip(self._places.items(), self._views, strict=True):
            for module, attribute in places:
                now = getattr(module, attribute)
                if now is not view:
                    if not isinstance(now, Tensor) or (now.shape, now.dtype) != (view.shape, view.dtype):
                        raise ModelError(
                            f"A forward pass gave the buffer '{name}' another shape or type, so its values for the "
                            "virtual shards of a batch cannot be combined; create it as it stays before run.prepare."
                        )
                    view.data.copy_(now.detach())
                    setattr(module, attribute, view)

    def begin_step(self) -> None:
        self.gather()
        self._before.copy_(self.values)
        # From where moves are counted: 0 where the value is not finite, as of a minimum.
        is_floating = self._before.is_floating_point()
        self._start = self._before.nan_to_num(0.0, 0.0, 0.0) if is_floating else self._before.long()
        self.moves: Tensor | None = None
        """The sum of the shards' moves since they were last collected."""

    def restore(self) -> None:
        # By .data: in a pipeline another shard's backward pass is still to come, with what its forward pass has saved.
        self.values.data.copy_(self._before)

    def end_pass(self, shard: int, weight: float) -> None:
        self.gather()
        if self.values.is_floating_point():
            move = (self.values - self._start) * weight
        elif shard == 0:
            move = self.values.long() - self._start
        else:
            return
        self.moves = move if self.moves is None else self.moves + move

    def combine(self, move: Tensor) -> Tensor:
        """Find the buffers after the step from the sum of all moves; whether one would not be finite, a scalar."""
        moved = move.to(self.values.device)
        self._after = self._start + (moved if self.values.is_floating_point() else moved.round()).to(self._start.dtype)
        return ~(self._after.isfinite() | ~self._before.isfinite()).all().to(move.device)

    def end_step(self, is_unsound: Tensor) -> None:
        after = self._after.to(self.values.dtype)
        self.values.data.copy_(torch.where(is_unsound.to(after.device), self._before, after))

    def moved(self) -> list[str]:
        """The names of the buffers that this step has changed."""
        before = self._before.split([view.numel() for view in self._views])
        pairs = zip(self._places, self._views, before, strict=True)
        return [name for name, view, old in pairs if not torch.equal(view.reshape(-1), old)]


def _tensor_at(places: Places) -> Tensor:
    module, attribute = places[0]
    value: Tensor = getattr(module, attribute)
    return value


def _hold(places: Places, tensor: Tensor) -> None:
    for module, attribute in places:
        setattr(module, attribute, tensor)


class Buffers:
    """The buffers of a model that its forward passes may change, and what the shards of a step made of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names: dict[int, str] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, module in model.named_modules():
            for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
                name = names.setdefault(id(tensor), f"{path}.{attribute}" if path else attribute)
                self._places.setdefault(name, []).append((module, attribute))
        self._moving = {
            name for name, places in self._places.items() if any(isinstance(one, BATCH_NORMS) for one, _ in places)
        }
        self._flats: list[_Flat] = []
        self._in_flats: set[str] = set()
        self._originals: dict[str, Tensor] = {}
        """Constants of which this step shows whether they move, as modules held them before."""
        self._num_steps = 0
        self.finds_others = True
        """Whether others may be found to move than those of batch norm layers."""
        self._is_clean = True
        """Whether no pass has been made since the buffers had the step's values."""
        self._arrange(self._moving)

    def _arrange(self, names: set[str]) -> None:
        """Have these buffers in flat vectors, and the others as modules held them before."""
        if names == self._in_flats:
            return
        for name, original in self._originals.items():
            if name not in self._moving:
                _hold(self._places[name], original)
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Places]] = {}
        for name in (one for one in self._places if one in names):
            now = _tensor_at(self._places[name])
            kinds.setdefault((now.dtype, now.device), {})[name] = self._places[name]
        self._originals = {name: _tensor_at(self._places[name]) for name in names - self._moving}
        self._flats, self._in_flats = [_Flat(alike) for alike in kinds.values()], names

    @property
    def num_sums(self) -> int:
        """How many numbers `take_moves` returns."""
        return sum(len(flat.values) for flat in self._flats)

    # --- the passes of a step ---

    @torch.no_grad()
    def begin_step(self, *, is_audited: bool = False) -> None:
        """Take the present values for those that every pass of this step begins with."""
        looked_at = set(self._moving)
        if self.finds_others and (is_audited or self._num_steps < _NUM_FIRST_STEPS):
            looked_at |= {name for name, places in self._places.items() if _may_move(_tensor_at(places))}
        self._arrange(looked_at)
        for flat in self._flats:
            flat.begin_step()
        self._num_steps += 1
        self._is_clean = True

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Give all buffers their values before the step."""
        if not self._is_clean:
            for flat in self._flats:
                flat.restore()
        self._is_clean = False

    def start_over(self) -> None:
        """As `begin_pass`, and forget the passes of the step."""
        self.begin_pass()
        for flat in self._flats:
            flat.moves = None

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

    def take_moves(self, like: Tensor) -> list[Tensor]:
        """What passes since the last call have moved buffers by: vectors of `num_sums` numbers together, which workers
        add up, of the dtype and on the device of `like`."""
        found = []
        for flat in self._flats:
            found.append(like.new_zeros(len(flat.values)) if flat.moves is None else flat.moves.to(like))
            flat.moves = None
        return found

    # --- the end of a step ---

    @torch.no_grad()
    def combine(self, sums: Tensor) -> Tensor:
        """Find what the step's passes made of the buffers, for `end_step`.

        Args:
            sums: [num_sums], the sum over workers of what `take_moves` returns.

        Returns:
            Whether a value would no longer be finite, a scalar; then none of them should move.
        """
        moves = sums.split([len(flat.values) for flat in self._flats]) if self._flats else ()
        unsound = [flat.combine(move) for flat, move in zip(self._flats, moves, strict=True)]
        return torch.stack(unsound).any() if unsound else sums.new_zeros(())

    @torch.no_grad()
    def end_step(self, is_unsound: Tensor) -> None:
        """Set the buffers of all workers to what `combine` found.

        Args:
            is_unsound: whether none of them moves, a scalar.

        Raises:
            ModelError: a constant moves that did not in the first steps.
        """
        for flat in self._flats:
            flat.end_step(is_unsound.bool())
        if not self._originals:
            return
        found = sorted({name for flat in self._flats for name in flat.moved()} - self._moving)
        self._moving = self._moving | set(found)
        self._arrange(self._moving)
        if found and self._num_steps > _NUM_FIRST_STEPS:
            raise ModelError(
                f"The buffer '{found[0]}' did not change in the first {_NUM_FIRST_STEPS} steps and does now, so "
                "workers may have different values of it; let it change from the first step on, or end the run where "
                "it begins to change and resume: a resumed run looks again in its first steps."
            )

    # --- between steps ---

    def hidden_state(self) -> dict[str, Tensor]:
        """The buffers, of any shapes, that passes change and a state_dict leaves out: a resumed run needs them too."""
        hidden = self._moving - self.model.state_dict().keys() if self._moving else set()
        return {name: _tensor_at(places) for name, places in self._places.items() if name in hidden}

    @torch.no_grad()
    def load_hidden_state(self, state: Mapping[str, Tensor]) -> None:
        for name, module_buffer in self.model.named_buffers():
            if name in state:
                module_buffer.copy_(state[name])


def _may_move(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.dtype in _DTYPES
    most_bytes = _MOST_BOOLS if tensor.dtype == torch.bool else _MOST_BYTES
    return is_plain and not tensor.is_meta and tensor.nbytes <= most_bytes


@contextmanager
def standing_in(*models: nn.Module) -> Iterator[None]:
    """A context for a stand-in sample, which may be a single one: batch norm layers do not normalise over it.

    Only they are switched: a model may use other parameters, and have other outputs, in evaluation mode.
    """
    every = (layer for model in models for layer in model.modules())
    layers = [layer for layer in every if isinstance(layer, BATCH_NORMS) and layer.training]
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
def untouched(*several: Buffers) -> Iterator[None]:
    """A context after which all buffers of these models are as before it: an evaluation teaches nothing."""
    flats = [flat for one in several for flat in one._flats]
    with buffers_kept(*[one.model for one in several]):
        for flat in flats:
            flat.begin_step()  # what passes begin with now
        for one in several:
            one._is_clean = True
        yield
    for flat in flats:
        flat.gather()


@contextmanager
def buffers_kept(*models: nn.Module) -> Iterator[None]:
    """A context for passes, or tracing, that leave no trace: all buffers are afterwards as before it."""
    known = [
        (module, attribute, tensor, tensor.detach().clone())
        for model in models
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
