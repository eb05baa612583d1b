"""Random numbers that a script draws for the samples of a batch between `run.batches` and `run.step`.

A worker has only its samples there. So a tensor with one row for each of them is filled shard by shard: the rows of a
virtual shard come from a generator of its own, whose seed follows from one number of the generator that the script
draws from. A tensor of any other shape is filled in the same way for all samples. So on any number of workers a sample
gets the same numbers, and the script's generator moves equally far.
"""

from __future__ import annotations

import functools
import itertools
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.containers import copied
from paceline.data import random_streams
from paceline.data.counter_random import key
from paceline.own_generators import NO_GENERATORS, OwnGenerators, is_same_code
from paceline.parallel.random_numbers.generators import seed_generators, torch_states
from paceline.parallel.random_numbers.random_operators import (
    LEAST_DIMS_OF_ROWS,
    Fill,
    UnknownOperatorError,
    call_filled_by,
    drawing_from,
    draws_random_numbers,
)
from paceline.parallel.random_numbers.torch_calls import FunctionCalls, OperatorCalls
from paceline.sharded_batch import apply_to_each
from paceline.train.steps.batch_recording import BatchRecording

_MOST_SHAPES = 1000
"""The most shapes to remember: padding may create new ones in every batch."""
_OFFSET_OF_NUMBER = 4
"""By so much a number moves the Philox generator of a GPU, which moves in steps of four."""
_OF_ALL = -1
"""Stands for a shard where something is drawn for all samples."""
_PYTHON_FUNCTIONS = {"gumbel_softmax", "multi_head_attention_forward", "rrelu"}
"""The functions of torch.nn.functional that draw random numbers, besides all kinds of dropout."""

GENERATOR_UNSAVED = (
    "Between run.batches and run.step the script draws from a generator of its own that no checkpoint holds: a run "
    "that resumes begins with its first numbers again. Give it to run.keep(name, generator)."
)
_DRAWS_UNSEEN = (
    "Between run.batches and run.step the script draws random numbers in a function that is not looked into, such as a "
    "compiled or scripted one, and changes the batch: where each sample has numbers of its own, which ones it gets "
    "depends on the number of workers. Draw in the loss function, where every virtual shard has its own, or in the "
    "data set."
)
_DRAWS_APART = (
    "Between run.batches and run.step the script draws random numbers for virtual shards that were collated apart: "
    "which ones a shard gets depends on the number of workers. Draw in a function given to batch.map, where every "
    "shard has its own, in the loss function or in the data set."
)
_DRAWS_EACH = (
    "Between run.batches and run.step the script draws as often as a worker has samples, and changes the batch: if it "
    "draws once for each sample, which numbers a sample gets depends on the number of workers. Draw all at once, with "
    "a row for each sample, such as torch.rand(len(x)), or in the loss function."
)
_DRAWS_SINGLE = (
    "Between run.batches and run.step the script draws a tensor of a single number where a worker has a single sample: "
    "it is taken for this sample's own. Draw a number that all samples share without dimensions, as by torch.rand(())."
)


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
        self._first_shard = self._num_calls = 0
        self._sizes: Sequence[int] = ()
        self._are_apart = False
        self._recording: BatchRecording | None = None
        self._shapes_of_all: set[tuple[str, torch.Size]] = set()
        """What was drawn in batches with other numbers of samples, which is not of samples."""
        self._rows_of_samples: set[tuple[str, torch.Size]] = set()
        """What rows were drawn in batches of several samples."""
        self._expected: set[int] = set()
        """Checksums of the states of torch's generators after all that was looked into; a script may go back to one."""
        self._applied: Callable[[Any], Any] | None = None
        self._generators_of_applied = NO_GENERATORS
        """What the function that was applied last draws from besides the global ones."""
        self._has_drawn_unseen = False
        """Whether something was drawn for this batch that was not looked into."""
        self._own_generators: list[torch.Generator] = []
        self._own_before: list[torch.Generator] = []
        """The script's own generators that it has drawn from for this batch, and for the batch before."""
        self.checksum: float | None = None
        """A checksum of the states of torch's generators after the last draw for the samples of this batch; None: there
        was none. It should be equal on all workers."""
        self._has_drawn_apart = False
        """Whether something was drawn for shards that have tensors of their own."""
        self._times_for_all: Counter[tuple[str, torch.Size]] = Counter()
        """How often something was drawn for all samples of this batch."""
        self._has_drawn_single = False
        """Whether a single number was drawn for a batch of one sample, and taken for this sample's own, which other
        batches have not shown."""

    def start(
        self,
        first_shard: int,
        sizes: Sequence[int],
        recording: BatchRecording | None,
        *,
        are_apart: bool,
        num_calls: int = 0,
    ) -> None:
        """Fill what is drawn from now on for the next batch.

        Args:
            first_shard: the number of this worker's first virtual shard.
            sizes: the numbers of samples of its shards.
            recording: what is recorded of this batch.
            are_apart: whether each shard has tensors of its own: nothing shows which of them something is drawn for.
            num_calls: how often `apply` calls a function at least.
        """
        self.stop()
        self._first_shard, self._sizes, self._recording = first_shard, sizes, recording
        self._num_calls = num_calls
        self._are_apart = are_apart
        self._has_drawn_unseen = self._has_drawn_apart = self._has_drawn_single = False
        self.checksum = None
        self._times_for_all.clear()
        self._own_before, self._own_generators = self._own_generators, []
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
        self._expected = {self._state()}
        self._is_active = True
        if not self._is_entered:
            self._is_entered = True
            self._functions.__enter__()  # type: ignore[no-untyped-call]

    def sentences(self, *, has_others: bool) -> list[str]:
        """What depends on the number of workers if the script has changed the batch by what it drew.

        Args:
            has_others: whether other workers have samples of the batch.
        """
        draws_each = 2 < self._num_samples <= max(self._times_for_all.values(), default=0)
        told = (
            (self._has_drawn_unseen, _DRAWS_UNSEEN),
            (self._has_drawn_apart, _DRAWS_APART),
            (draws_each, _DRAWS_EACH),
            (self._has_drawn_single and has_others, _DRAWS_SINGLE),
        )
        return [sentence for is_told, sentence in told if is_told]

    @property
    def lasting_generators(self) -> list[torch.Generator]:
        """The script's own generators that it has drawn from for this batch and the batch before."""
        return [one for one in self._own_generators if any(one is before for before in self._own_before)]

    def apply(self, function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a function returns for the content of each shard of this worker; all that it draws is the shard's.

        Workers that hold parts of a model, which the function may call, call it equally often: those with fewer shards
        than others for copies of their first one as well, which count for nothing.
        """
        stand_ins = tuple(copied(shards[0]) for _ in range(len(shards), self._num_calls))
        if not self._is_active:
            return apply_to_each(function, shards + stand_ins)[: len(shards)]
        if not is_same_code(function, self._applied):
            self._applied, self._generators_of_applied = function, OwnGenerators(function)
        made = []
        with self.paused(), self._generators_of_applied.kept():
            number, offset = self._next_number(None, self._device)
            for shard, content in enumerate(shards + stand_ins, self._first_shard):
                seed = key(number, random_streams.IN_LOOP, offset, shard)
                seed_generators(seed, self._device)
                self._generators_of_applied.seed(seed)
                made.append(function(content))
            seed_generators(key(number, random_streams.IN_LOOP, offset, _OF_ALL), self._device)
        return tuple(made[: len(shards)])

    def _call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Compiled functions draw as they do without a mode, which is noticed afterwards.
        if torch.compiler.is_compiling() or not self._is_active or not _may_draw(function):
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and all(one is not generator for one in self._own_generators):
            self._own_generators.append(generator)  # operators get another object for it
        with self._operators:
            return function(*args, **kwargs)

    def _call_operator(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draws_random_numbers(operator, args, kwargs):
            return operator(*args, **kwargs)
        self._notice_what_was_not_seen()
        try:
            if types:  # tensors of other classes, such as DTensor, have rules of their own
                return operator(*args, **kwargs)
            return call_filled_by(functools.partial(self._fill, kwargs.get("generator")), operator, args, kwargs)
        except UnknownOperatorError:
            return self._call_unknown(operator, args, kwargs)
        finally:
            self._expected.add(self._state())

    def _call_unknown(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that does not fill a tensor: for the rows of each shard, or else for all samples."""
        generator = kwargs.get("generator")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        device = torch.empty(0, device=kwargs.get("device") or (given[0].device if given else "cpu")).device
        number = self._next_number(generator, device)
        least_dims = LEAST_DIMS_OF_ROWS.get(operator)
        if least_dims is None or not all(
            one.dim() >= least_dims and self._is_of_samples(str(operator), one) for one in given
        ):
            with self._unrecorded():
                returned = _call_with(self._seeded(device, *number, _OF_ALL), operator, args, kwargs)
            for one in tree_leaves(returned):
                if isinstance(one, Tensor):
                    self._take(one, operator, of_rows=False)
            return returned
        with self._unrecorded():
            parts = []
            for shard, rows in enumerate(_slices(self._sizes), self._first_shard):
                own_args, own_kwargs = tree_map_only(Tensor, itemgetter(rows), (args, kwargs))
                parts.append(_call_with(self._seeded(device, *number, shard), operator, own_args, own_kwargs))
            drawn = torch.cat(parts)
        self._take(drawn, operator, of_rows=True)
        return drawn

    def _fill(self, generator: torch.Generator | None, operator: str, values: Tensor, fill: Fill) -> None:
        if isinstance(values, nn.Parameter):  # of no batch
            fill(values, generator)
            return
        number = self._next_number(generator, values.device)
        is_of_rows = self._is_of_samples(operator, values)
        with self._unrecorded():
            if is_of_rows:
                self._fill_shards(values, fill, *number)
            else:
                fill(values, self._seeded(values.device, *number, _OF_ALL))
        self._take(values, operator, of_rows=is_of_rows)

    def _take(self, drawn: Tensor, operator: object, *, of_rows: bool) -> None:
        """Take note of random numbers that were drawn: a row for each sample, or for all of them."""
        if of_rows:
            rows = str(operator), drawn.shape[1:]
            if self._num_samples > 1 and len(self._rows_of_samples) < _MOST_SHAPES:
                self._rows_of_samples.add(rows)
            self._has_drawn_single |= drawn.numel() == 1 and rows not in self._rows_of_samples
            # Of the state, as it follows from all that was drawn before, for something else too.
            self.checksum = float(self._state())
        else:
            self._times_for_all[str(operator), drawn.shape] += 1
        self._has_drawn_apart |= self._are_apart and drawn.dim() > 0
        if self._recording is not None:
            name = str(operator).removeprefix("aten.").partition(".")[0]
            self._recording.take_drawn(drawn, name, of_rows=of_rows)

    def _next_number(self, generator: torch.Generator | None, device: torch.device) -> tuple[int, int]:
        """Two numbers that no other draw from a generator, or from the device's own, has. Whatever is drawn, it moves
        by one number: on another number of workers there may be other rows."""
        with self._unrecorded():
            if (device if generator is None else generator.device).type != "cuda":
                return int(torch.randint(2**63 - 1, (), generator=generator, device="cpu")), 0
            # Its state is known to the host, which need not wait for the device.
            own = generator or torch.cuda.default_generators[device.index]
            number = own.initial_seed(), own.get_offset()
            own.set_offset(number[1] + _OFFSET_OF_NUMBER)
            return number

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
        return False

    @property
    def _num_samples(self) -> int:
        return sum(self._sizes)

    def _state(self) -> int:
        """A checksum of the states of torch's generators."""
        return zlib.crc32(b"".join(torch_states(self._device)))

    def _notice_what_was_not_seen(self) -> None:
        """Notice draws of functions that are not looked into; a new seed is none."""
        if self._state() not in self._expected and not _are_new(self._device):
            self._has_drawn_unseen = True


def _are_new(device: torch.device) -> bool:
    """Whether nothing was drawn from torch's generators since they got their seeds."""
    own = torch.default_generator
    if not torch.equal(torch.Generator().manual_seed(own.initial_seed()).get_state(), own.get_state()):
        return False
    return device.type != "cuda" or torch.cuda.default_generators[device.index or 0].get_offset() == 0


def _call_with(generator: torch.Generator, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that draws, with numbers of a generator."""
    if kwargs.get("generator") is not None:
        return operator(*args, **{**kwargs, "generator": generator})
    with drawing_from(generator):
        return operator(*args, **kwargs)


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    """The places of the rows of each shard."""
    for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield slice(stop - size, stop)


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
