"""What the passes of a virtual shard begin with, whichever worker computes it: seeded generators, and buffers.

Generators: those of Python, NumPy and torch are seeded for each virtual shard, torch's for each block of a model too.

Buffers: there is one rule for all of them, the running statistics of batch norm included. Every virtual shard begins
with the buffers of the step, and a step ends with one value of each for all workers:

    b + sum over shards s of n_s / n (b_s - b)    floating: the mean of the shards' values, weighted by samples
    b_0                                           any other, such as a counter: that of the global batch's first shard

with b the buffer before the step, b_s what the forward pass of shard s made of it and n_s its samples. What shards make
of buffers is taken before their backward pass, in which activation checkpointing may run layers again. An element that
would not be finite stays as it is.

Most buffers never change. Those of batch norm layers do; which of the others do is seen in a run's first steps, and
later in the steps that are audited. The ones that change lie in one flat tensor of each dtype, so that a pass costs a
few operations however many layers there are.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.mathematics import split_mix
from paceline.parallel.initial_weights import ALIGNMENT_BYTES

# --- generators ---


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all generators. Not by torch.manual_seed, which keeps a call and its stack trace for an unused CUDA."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def torch_states(device: torch.device) -> list[bytes]:
    """The states of torch's own generators, of the host and of a GPU: equal where nothing was drawn in between."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [state.numpy().tobytes() for state in states]


def host_states() -> tuple[bytes, bytes]:
    """The states of NumPy's and Python's generators."""
    return pickle.dumps(np.random.get_state(legacy=False)), pickle.dumps(random.getstate())


class BlockSeeds:
    """Seeds torch's generators, of the host and of a device, whenever a block begins its forward pass.

    It does so from `begin_shard` to `end` only, backward passes included: they may compute blocks again. What
    torch.compile compiles draws as it would without.
    """

    def __init__(self, device: torch.device, blocks: Mapping[str, nn.Module]) -> None:
        """`blocks`: by path in the whole model."""
        self._on_gpu = device.type == "cuda"
        self._state: int | None = None
        """What a shard's seed adds to those of its blocks; None: blocks draw from the generators as they are."""
        self._hooks = [block.register_forward_pre_hook(self._hook(path)) for path, block in blocks.items()]

    def leave_blocks(self) -> None:
        """Seed no block: a compiled model that is run as it is, after too many shapes, has to draw as it did before."""
        for hook in self._hooks:
            hook.remove()

    def begin_shard(self, seed: int) -> None:
        """A forward or backward pass of the virtual shard with this `seed` begins."""
        self._state = split_mix(seed, 0)

    def end(self) -> None:
        """Leave the generators alone from now on."""
        self._state = None

    def seed_block(self, path: str) -> None:
        """Seed the generators for a block of another worker, which is passed over here."""
        self._hook(path)()

    def _hook(self, path: str) -> Callable[..., None]:
        number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest())

        def seed_block(*_given: Any) -> None:
            if not torch.compiler.is_compiling() and self._state is not None:  # else each seed would be compiled in
                seed = split_mix(self._state, number) >> 1
                torch.default_generator.manual_seed(seed)
                if self._on_gpu:
                    torch.cuda.manual_seed(seed)

        return seed_block


# --- buffers ---


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_NUM_FIRST_STEPS = 2
"""What has not changed in so many steps is a constant."""

_MOST_BYTES, _MOST_BOOLS = 1 << 26, 1 << 16
"""Larger buffers are constants, as quantised weights and masks are; so are complex ones and 8-bit floats."""


class Buffers:
    """The buffers of a model that its forward passes may change, and what the shards of a step make of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.finds_others = True
        """Whether others may be found to change than those of batch norm layers."""
        names: dict[Tensor, str] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        """The modules that hold a buffer, and its attribute there; several if modules share it."""
        for path, module in model.named_modules():
            for attribute, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
                name = names.setdefault(tensor, f"{path}.{attribute}" if path else attribute)
                self._places.setdefault(name, []).append((module, attribute))
        self._changing = {
            name for name, places in self._places.items() if any(isinstance(one, BATCH_NORMS) for one, _ in places)
        }
        self._overlapping = _overlapping(names)
        self._flats: list[Tensor] = []
        self._slices: dict[str, Tensor] = {}
        """Slices of the flat vectors, which modules hold."""
        self._constants: dict[str, Tensor] = {}
        """The values of those of which this step shows whether they change."""
        self._num_steps = 0
        self.take_values()

    def _flatten(self, names: Set[str]) -> None:
        """Have these buffers in flat vectors, one for each dtype and device."""
        if names == self._slices.keys():
            return
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, places in self._places.items():
            if name in names:
                now: Tensor = getattr(*places[0])
                kinds.setdefault((now.dtype, now.device), {})[name] = now
        self._flats, self._slices = [], {}
        for (dtype, device), alike in kinds.items():
            lengths = [one.numel() + -one.numel() % (ALIGNMENT_BYTES // dtype.itemsize) for one in alike.values()]
            flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
            self._flats.append(flat)
            for (name, now), own in zip(alike.items(), flat.split(lengths), strict=True):
                # By .data: autograd counts the changes of each one, not of all together.
                self._slices[name] = own[: now.numel()].view(now.shape).data.copy_(now)
                for module, attribute in self._places[name]:
                    setattr(module, attribute, self._slices[name])

    def _gather(self) -> None:
        """Take the values of tensors that modules have put in the place of ours."""
        for name, own in self._slices.items():
            for module, attribute in self._places[name]:
                now = getattr(module, attribute)
                if now is not own:
                    if not isinstance(now, Tensor) or (now.shape, now.dtype) != (own.shape, own.dtype):
                        raise ModelError(
                            f"A forward pass gave the buffer '{name}' another shape or type, so its values for the "
                            "virtual shards of a batch cannot be combined; create it as it stays before run.prepare."
                        )
                    own.data.copy_(now.detach())
                    setattr(module, attribute, own)

    def _put_back(self) -> None:
        """Have modules hold ours again: layers that a backward pass computes again may have put others there."""
        for name, own in self._slices.items():
            for module, attribute in self._places[name]:
                if getattr(module, attribute) is not own:
                    setattr(module, attribute, own)

    @property
    def num_sums(self) -> int:
        """How many numbers `changes` returns."""
        return sum(len(_in_pieces(start)) for start in self._starts)

    # --- a step ---

    @torch.no_grad()
    def begin_step(self, *, is_audited: bool = False) -> None:
        """Take the present values for those that every pass of this step begins with."""
        self.take_values(is_audited=is_audited)
        self._constants = {name: self._slices[name].clone() for name in self._slices.keys() - self._changing}
        self._num_steps += 1

    @torch.no_grad()
    def take_values(self, *, is_audited: bool = False) -> None:
        """Have passes begin with the present values: those of all buffers until the model has made its first steps."""
        names = set(self._changing)
        if self.finds_others and (is_audited or self._num_steps < _NUM_FIRST_STEPS):
            names |= {name for name, places in self._places.items() if _may_change(getattr(*places[0]))}
        self._flatten(names)
        self._gather()
        self._before = [flat.clone() for flat in self._flats]
        # From where changes are counted: 0 where the value is not finite, as of a minimum.
        self._starts = [
            before.nan_to_num(0.0, 0.0, 0.0)
            if before.is_floating_point()
            else before.to(torch.int64 if before.itemsize > 2 else torch.int16)
            for before in self._before
        ]

    @torch.no_grad()
    def begin_pass(self) -> None:
        """Give all buffers their values before the step."""
        self._put_back()
        for flat, before in zip(self._flats, self._before, strict=True):
            # By .data: in a pipeline the backward pass of another shard is to come, with what its forward pass saved.
            flat.data.copy_(before)

    @torch.no_grad()
    def changes(self, shard: int, weight: float, like: Tensor) -> list[Tensor]:
        """What the forward pass of a shard changed buffers by, for workers to add up. Raises `ModelError` where a
        buffer has another shape or type now.

        Args:
            weight: the part of the global batch that the shard is.
            like: a tensor of the dtype and on the device of the result.

        Returns:
            Vectors of `num_sums` numbers together.
        """
        self._gather()
        return [
            _in_pieces(flat.to(start) - start).to(like) * (weight if flat.is_floating_point() else shard == 0)
            for flat, start in zip(self._flats, self._starts, strict=True)
        ]

    @torch.no_grad()
    def end_step(self, sums: Tensor) -> None:
        """Set the buffers of all workers to what the step's passes made of them. Raises `ModelError` where a constant
        changes that did not in the first steps. `sums`: [num_sums], the sums of all shards' `changes`."""
        self._put_back()
        of_flats = sums.split([len(_in_pieces(start)) for start in self._starts]) if self._flats else ()
        for flat, start, before, changes in zip(self._flats, self._starts, self._before, of_flats, strict=True):
            after = start + changes.to(_in_pieces(start)).view(start.dtype)
            flat.data.copy_(torch.where(after.isfinite(), after.to(flat.dtype), before))
        found = [name for name, before in self._constants.items() if not torch.equal(self._slices[name], before)]
        self._changing |= set(found)
        self._constants = {}
        if views := self._overlapping & set(found):
            raise ModelError(
                f"The buffer '{min(views)}' changes and lies in the memory of another one, of which it is a view, so "
                "their values for the virtual shards of a batch cannot be combined; hold one of them, and take the "
                "view in forward."
            )
        if found and self._num_steps > _NUM_FIRST_STEPS:
            raise ModelError(
                f"The buffer '{min(found)}' did not change in the first {_NUM_FIRST_STEPS} steps and does now, so "
                "workers may have different values of it; let it change from the first step on, or end the run where "
                "it begins to change and resume: a resumed run looks again in its first steps."
            )

    # --- checkpoints ---

    def hidden_state(self) -> dict[str, Tensor]:
        """The buffers, of any shapes, that passes change and a state_dict leaves out: a resumed run needs them too."""
        hidden = self._changing - self.model.state_dict().keys() if self._changing else set()
        return {name: getattr(*places[0]) for name, places in self._places.items() if name in hidden}

    @torch.no_grad()
    def load_hidden_state(self, state: Mapping[str, Tensor]) -> None:
        for name, module_buffer in self.model.named_buffers():
            if name in state:
                module_buffer.copy_(state[name])


def _in_pieces(values: Tensor) -> Tensor:
    """Whole numbers in pieces of 16 bits, 1-D: float32, in which changes are added up, holds these exactly."""
    return values if values.is_floating_point() else values.view(torch.int16)


def _overlapping(names: Mapping[Tensor, str]) -> set[str]:
    """The names of buffers that lie in the memory of another one."""
    spans = sorted(
        (str(one.device), one.data_ptr(), one.data_ptr() + one.nbytes, name)
        for one, name in names.items()
        if _may_change(one) and one.numel()
    )
    found: set[str] = set()
    last = ("", 0, "")
    for device, start, stop, name in spans:
        if (device, start) < last[:2]:
            found |= {name, last[2]}
        last = max(last, (device, stop, name))
    return found


def _may_change(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
    is_number = not tensor.is_complex() and (tensor.itemsize > 1 or not tensor.is_floating_point())
    most_bytes = _MOST_BOOLS if tensor.dtype == torch.bool else _MOST_BYTES
    return is_plain and is_number and tensor.nbytes <= most_bytes


@contextmanager
def frozen_batch_norms(*models: nn.Module) -> Iterator[None]:
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

    def rest_on_single_value(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if layer.training and inputs[0].numel() == inputs[0].shape[1]:
            layer.training, layer.rests_once = False, True  # type: ignore[assignment]

    def work_again(layer: nn.Module, _inputs: object, _output: object) -> None:
        if vars(layer).pop("rests_once", False):
            layer.training = True

    for layer in model.modules():
        if isinstance(layer, BATCH_NORMS) and layer.running_mean is not None:
            layer.register_forward_pre_hook(rest_on_single_value)
            layer.register_forward_hook(work_again, always_call=True)


@contextmanager
def preserved(*several: Buffers) -> Iterator[None]:
    """A context after which all buffers of these models are as before it: an evaluation teaches nothing."""
    for one in several:
        one.take_values()
    with preserved_buffers(*[one.model for one in several]):
        yield


@contextmanager
def preserved_buffers(*models: nn.Module) -> Iterator[None]:
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
