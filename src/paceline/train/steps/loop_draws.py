"""Random numbers that a script draws for the samples of a batch between `run.batches` and `run.step`.

A worker has only its samples there. So a tensor with one row for each of them is filled shard by shard: the rows of a
virtual shard come from a generator of its own, whose seed follows from one number of the generator that the script
draws from. A tensor of any other shape is filled in the same way for all samples. So on any number of workers a sample
gets the same numbers, and the script's generator moves equally far.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import tree_leaves

from paceline.data import random_streams
from paceline.data.counter_random import key
from paceline.parallel.random_numbers.generators import generator_states, seed_generators
from paceline.parallel.random_numbers.random_operators import (
    Fill,
    UnknownOperatorError,
    call_filled_by,
    drawing_from,
    draws_random_numbers,
)
from paceline.parallel.random_numbers.torch_calls import FunctionCalls, OperatorCalls
from paceline.train.steps.batch_recording import BatchRecording

_MOST_SHAPES = 1000
"""So many are remembered: padding may make ever new ones."""
_OFFSET_OF_NUMBER = 4
"""By so much a number moves the Philox generator of a GPU, which moves in steps of four."""
_OF_ALL = -1
"""Stands for a shard where something is drawn for all samples."""
_PYTHON_FUNCTIONS = {"gumbel_softmax", "multi_head_attention_forward", "rrelu"}
"""Those of torch.nn.functional that draw, besides all kinds of dropout."""


class LoopDraws:
    """Fills what a script draws for the samples of one batch after the other."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: the worker's.
        """
        self._device = device
        self._functions = FunctionCalls(self._call_function)
        self._operators = OperatorCalls(self._call_operator)
        self._is_active = self._is_entered = False
        self._generators: dict[torch.device, torch.Generator] = {}
        self._first_shard = 0
        self._sizes: Sequence[int] = ()
        self._are_apart = False
        self._lengths: set[int] = set()
        """The numbers of rows of the tensors of this batch."""
        self._recording: BatchRecording | None = None
        self._shapes_of_all: set[tuple[str, torch.Size]] = set()
        """What was drawn in batches with other numbers of samples, which is not of samples."""
        self._rows_of_samples: set[tuple[str, torch.Size]] = set()
        """What rows were drawn in batches of several samples."""
        self._expected: tuple[bytes, bytes] = b"", b""
        """The states of torch's generators after all that was looked into."""
        self.has_drawn_elsewhere = False
        """Whether something was drawn for this batch that may be of its samples, and is not of single shards."""
        self.has_drawn_single = False
        """Whether a single number was drawn for a batch of one sample, and taken for this sample's own, which other
        batches have not shown."""

    def start(
        self, first_shard: int, sizes: Sequence[int], recording: BatchRecording | None, *, are_apart: bool
    ) -> None:
        """Fill what is drawn from now on for the next batch.

        Args:
            first_shard: the number of this worker's first virtual shard.
            sizes: the numbers of samples of its shards.
            recording: what is recorded of this batch.
            are_apart: whether each shard has tensors of its own: nothing shows which of them something is drawn for.
        """
        self.stop()
        self._first_shard, self._sizes, self._recording = first_shard, sizes, recording
        self._lengths = set(sizes) if are_apart else {sum(sizes)}
        self._are_apart = are_apart
        self.has_drawn_elsewhere = self.has_drawn_single = False
        self.go_on()

    def stop(self) -> None:
        """Fill nothing more; under a mode that was entered later, this one stays behind without effect."""
        if self._is_active:
            self._is_active = False
            self._notice_what_was_not_seen()
        if self._is_entered and _get_current_function_mode() is self._functions:
            self._is_entered = False
            self._functions.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context that is not the script's."""
        was_active = self._is_active
        self.stop()
        try:
            yield
        finally:
            if was_active:
                self.go_on()

    def go_on(self) -> None:
        """After `stop`: fill what is drawn for another step on the same batch."""
        self._expected = self._states()
        self._is_active = True
        if not self._is_entered:
            self._is_entered = True
            self._functions.__enter__()  # type: ignore[no-untyped-call]

    def apply(self, function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a function returns for the content of each shard of this worker; all that it draws is the shard's."""
        if not self._is_active:
            return tuple(function(shard) for shard in shards)
        made = []
        with self.paused():
            number, offset = _next_number(None, self._device)
            for shard, content in enumerate(shards, self._first_shard):
                seed_generators(key(number, random_streams.IN_LOOP, offset, shard), self._device)
                made.append(function(content))
            seed_generators(key(number, random_streams.AFTER_SHARDS, offset, 0), self._device)
        return tuple(made)

    def _call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Compiled functions draw as they do without a mode, which is noticed afterwards.
        if torch.compiler.is_compiling() or not self._is_active or not _may_draw(function):
            return function(*args, **kwargs)
        with self._operators:
            return function(*args, **kwargs)

    def _call_operator(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draws_random_numbers(operator, args, kwargs):
            return operator(*args, **kwargs)
        self._notice_what_was_not_seen()
        generator = kwargs.get("generator")
        try:
            if types:  # tensors of other classes, such as DTensor, have rules of their own
                raise UnknownOperatorError
            returned = call_filled_by(functools.partial(self._fill, generator), operator, args, kwargs)
        except UnknownOperatorError:
            returned = operator(*args, **kwargs) if types else self._call_for_all(operator, args, kwargs, generator)
            drawn = [one for one in tree_leaves(returned) if isinstance(one, Tensor)]
            self.has_drawn_elsewhere |= any(map(self._may_be_of_samples, drawn))
        self._expected = self._states()
        return returned

    def _call_for_all(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator | None
    ) -> Any:
        """Call an operator that draws in a way that is not known, with numbers for all samples."""
        given = [one.device for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        device = torch.empty(0, device=kwargs.get("device") or next(iter(given), "cpu")).device  # with its index
        with self._unrecorded():
            own = self._seeded(device, *_next_number(generator, device), _OF_ALL)
        if generator is not None:
            return operator(*args, **kwargs | {"generator": own})
        with drawing_from(own):
            return operator(*args, **kwargs)

    def _fill(self, generator: torch.Generator | None, operator: str, values: Tensor, fill: Fill) -> None:
        if isinstance(values, nn.Parameter):  # of no batch
            fill(values, generator)
            return
        # Whatever is drawn, the generator moves by one number: on another number of workers it may be of other rows.
        with self._unrecorded():
            number = _next_number(generator, values.device)
        if not self._is_of_samples(operator, values):
            fill(values, self._seeded(values.device, *number, _OF_ALL))
            return
        rows = operator, values.shape[1:]
        if self._num_samples > 1 and len(self._rows_of_samples) < _MOST_SHAPES:
            self._rows_of_samples.add(rows)
        self.has_drawn_single |= values.numel() == 1 and rows not in self._rows_of_samples
        with self._unrecorded():
            self._fill_shards(values, fill, *number)
        if self._recording is not None:
            self._recording.take_rows(values)

    def _fill_shards(self, values: Tensor, fill: Fill, number: int, offset: int) -> None:
        """Fill the rows of each shard with what follows from two numbers and the shard's own."""
        sizes = list(self._sizes)
        fills = [fill] * len(sizes)
        if fill.probabilities is not None:
            fills = [replace(fill, probabilities=part.contiguous()) for part in fill.probabilities.split(sizes)]
        for shard, part in enumerate(values.split(sizes)):
            # The order of numbers follows from how a tensor lies in memory, which is left open for a single sample.
            drawn = torch.empty(part.shape, dtype=part.dtype, device=part.device)
            fills[shard](drawn, self._seeded(values.device, number, offset, self._first_shard + shard))
            part.copy_(drawn)

    def _seeded(self, device: torch.device, number: int, offset: int, shard: int) -> torch.Generator:
        """A generator for a virtual shard, or for all samples."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(key(number, random_streams.IN_LOOP, offset, shard))

    def _unrecorded(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recording is None else self._recording.paused()

    def _is_of_samples(self, operator: str, values: Tensor) -> bool:
        """Whether a tensor that is to be filled has a row for each sample of this worker's."""
        drawn = operator, values.shape
        if values.dim() == 0 or drawn in self._shapes_of_all:
            return False
        if len(values) == self._num_samples and not self._are_apart:
            return True
        if len(self._shapes_of_all) < _MOST_SHAPES and not self._are_apart:
            self._shapes_of_all.add(drawn)
        self.has_drawn_elsewhere |= len(values) > 1 and self._may_be_of_samples(values)
        return False

    def _may_be_of_samples(self, values: Tensor) -> bool:
        return not self._lengths.isdisjoint(values.shape)

    @property
    def _num_samples(self) -> int:
        return sum(self._sizes)

    def _notice_what_was_not_seen(self) -> None:
        """Notice draws of functions that are not looked into; a new seed is none."""
        if self._states() != self._expected and not _are_new(self._device):
            self.has_drawn_elsewhere = True

    def _states(self) -> tuple[bytes, bytes]:
        """Of torch's generators alone: Python's and NumPy's mostly give one number for all samples."""
        _, on_host, on_device, _ = generator_states(self._device)
        return on_host, on_device


def _are_new(device: torch.device) -> bool:
    """Whether nothing was drawn from torch's generators since they got their seeds."""
    own = torch.default_generator
    if not torch.equal(torch.Generator().manual_seed(own.initial_seed()).get_state(), own.get_state()):
        return False
    return device.type != "cuda" or torch.cuda.default_generators[device.index or 0].get_offset() == 0


def _next_number(generator: torch.Generator | None, device: torch.device) -> tuple[int, int]:
    """Two numbers that no other draw from a generator, or from the device's own, has; moves it."""
    if (device if generator is None else generator.device).type != "cuda":
        return int(torch.randint(2**63 - 1, (), generator=generator, device="cpu")), 0
    # Its state is known to the host, which need not wait for the device.
    own = generator or torch.cuda.default_generators[device.index]
    number = own.initial_seed(), own.get_offset()
    own.set_offset(number[1] + _OFFSET_OF_NUMBER)
    return number


@functools.cache
def _may_draw(function: Any) -> bool:
    """Whether a function of torch may draw random numbers; what is missed here is noticed afterwards."""
    name = getattr(function, "__name__", "")
    if isinstance(function, types.FunctionType):
        return "dropout" in name or name in _PYTHON_FUNCTIONS or function.__module__ == "torch.nn.init"
    operators = getattr(torch.ops.aten, name, None)
    return isinstance(operators, OpOverloadPacket) and any(
        torch.Tag.nondeterministic_seeded in getattr(operators, overload).tags for overload in operators.overloads()
    )
