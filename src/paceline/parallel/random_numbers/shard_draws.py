"""Random numbers of virtual shards that go through the model together: each shard draws what it would draw alone.

A dropout mask belongs to its virtual shard, whichever worker computes it. So where several shards share a pass, a
tensor of random numbers is filled shard by shard, each with a generator of its own; everything else is computed for all
shards together.

Which dimension of such a tensor holds the samples is found by a rehearsal: the shards go through the model one by one
and then together, without gradients, and the dimension that grows with the number of samples holds them. The caller
compares the losses of both: masks of a rehearsal drop half of all values, so one that is applied to the wrong samples
gives another loss. What a pass draws later without having been rehearsed is noticed in that pass.

A rehearsal looks at every operator, which takes longer than to launch a small kernel. So it also learns which functions
of torch neither draw nor read values, and a pass looks into all others only. If one of these draws after all, torch's
own generator has moved on at the end of the pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from paceline.parallel.assignment import ShardRange
from paceline.parallel.random_numbers.random_operators import (
    Fill,
    UnknownOperatorError,
    call_filled_by,
    draws_random_numbers,
)
from paceline.parallel.random_numbers.torch_calls import FunctionCalls, OperatorCalls
from paceline.samples import taking_turns

SeedOfShard = Callable[[int], int]
"""The seed of a virtual shard's generators."""


@dataclass(frozen=True)
class Draw:
    """A tensor of random numbers that a pass over several shards drew."""

    operator: str
    num_dims: int
    sample_dim: int
    """The dimension along which samples lie, each of which may have several rows."""
    order: tuple[int, ...]
    """The dimensions in the order in which the tensor lies in memory, which is the order of its numbers."""
    has_single_samples: bool
    """Whether some shard has one sample: alone it may lie in another order, since torch leaves open which."""


Pattern = tuple[Draw, ...]
"""The draws of a pass in their order."""


@dataclass(frozen=True)
class SingleDraw:
    """A tensor of random numbers that a pass over one shard drew."""

    operator: str
    shape: torch.Size


Generators = Sequence[tuple[torch.Generator, int]]
"""A generator for each shard of a pass, and its seed."""

FindSampleDim = Callable[[Pattern, str, Tensor], int | None]
"""find(before, operator, values): the dimension of samples in what this operator fills after these draws, if known."""


class WatchedFunctions:
    """Which functions of torch have to be looked into, as far as rehearsals have shown."""

    def __init__(self) -> None:
        self._called: set[Any] = set()
        self._acting: set[Any] = set()
        self.misses_some = False
        """Whether something was drawn or read outside of them, by a scripted model for instance."""

    def learn(self, function: Any, acts: bool) -> None:
        """Learn whether a call of this function drew random numbers or read a value out of a tensor."""
        (self._acting if acts else self._called).add(function)

    def may_act(self, function: Any) -> bool:
        """Whether a call of this function may draw or read: one that was never called may."""
        return function not in self._called or function in self._acting


class _Draws:
    """Inside, random numbers come from the generators of virtual shards."""

    def __init__(self, generators: Generators, functions: WatchedFunctions, *, is_rehearsal: bool) -> None:
        self._generators = generators
        self._functions = functions
        self._is_rehearsal = is_rehearsal
        self._operators = OperatorCalls(self._call_operator)
        self._modes = ExitStack()
        self._num_acts = 0
        """How often random numbers were drawn or values read."""
        self._num_acts_of_functions = 0
        self.is_possible = True
        """False once something was drawn that no shard can have as its own."""

    def __enter__(self) -> Self:
        for generator, seed in self._generators:
            generator.manual_seed(seed)
        if self._is_rehearsal or not self._functions.misses_some:
            self._modes.enter_context(FunctionCalls(self._call_function))
        if self._is_rehearsal or self._functions.misses_some:
            self._modes.enter_context(self._operators)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()
        self._functions.misses_some |= self._is_rehearsal and self._num_acts > self._num_acts_of_functions

    def _call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_rehearsal:
            before = self._num_acts
            returned = function(*args, **kwargs)
            self._functions.learn(function, acts=self._num_acts > before)
            self._num_acts_of_functions += self._num_acts - before
            return returned
        if not self._functions.may_act(function):
            return function(*args, **kwargs)
        with self._operators:
            return function(*args, **kwargs)

    def _call_operator(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            self._num_acts += 1
            return self._read(operator(*args))
        if not draws_random_numbers(operator, args, kwargs) or kwargs.get("generator") is not None:
            return operator(*args, **kwargs)
        self._num_acts += 1
        try:
            if types:  # tensors of other classes, such as DTensor, have rules of their own
                raise UnknownOperatorError
            return call_filled_by(self._fill, operator, args, kwargs)
        except UnknownOperatorError:
            self.is_possible = False
            return operator(*args, **kwargs)

    def _read(self, value: Any) -> Any:
        """The value that the model gets when it reads this one out of a tensor."""
        return value

    def _fill(self, operator: str, values: Tensor, fill: Fill) -> None:
        raise NotImplementedError

    def _fill_shard(self, number: int, values: Tensor, fill: Fill) -> None:
        generator, _ = self._generators[number]
        if self._is_rehearsal:
            fill.rehearse(values, generator)
        else:
            fill(values, generator)


class SingleShardRehearsal(_Draws):
    """A context for the pass of a single shard; its draws are noted."""

    def __init__(self, generators: Generators, functions: WatchedFunctions, *, inverts_answers: bool = False) -> None:
        """
        Args:
            inverts_answers: whether the model reads false out of a tensor for true, and true for false.
        """
        super().__init__(generators, functions, is_rehearsal=True)
        self._inverts_answers = inverts_answers
        self._num_answers = 0
        self.draws: list[SingleDraw] = []
        self.depends_on_answers = False
        """Whether a truth value was read before the last draw."""

    def _read(self, value: Any) -> Any:
        if not isinstance(value, bool):
            return value
        self._num_answers += 1
        return value != self._inverts_answers

    def _fill(self, operator: str, values: Tensor, fill: Fill) -> None:
        self.depends_on_answers = self._num_answers > 0
        self.draws.append(SingleDraw(operator, values.shape))
        self._fill_shard(0, values, fill)


class OneNumber(_Draws):
    """A context in which every random tensor is filled with one value, whichever samples share a pass."""

    def _fill(self, operator: str, values: Tensor, fill: Fill) -> None:  # noqa: ARG002 - whichever
        fill.repeat_one(values, self._generators[0][0])


class SharedPass(_Draws):
    """A context for a pass of several shards."""

    def __init__(
        self,
        shards: ShardRange,
        generators: Generators,
        functions: WatchedFunctions,
        find_sample_dim: FindSampleDim,
        *,
        is_rehearsal: bool = False,
    ) -> None:
        super().__init__(generators, functions, is_rehearsal=is_rehearsal)
        self._shards = shards
        self._find_sample_dim = find_sample_dim
        self._has_read_number = False
        self.pattern: Pattern = ()
        self.is_known = True
        """False once a dimension was not known: numbers were then drawn for all shards together."""

    def _read(self, value: Any) -> Any:
        self._has_read_number |= not isinstance(value, bool)
        return value

    def _fill(self, operator: str, values: Tensor, fill: Fill) -> None:
        # A number that was read may decide what is drawn, and would be another one for each shard. Checkpointed layers
        # draw again in backward, where nothing tells for which shard.
        draws_again = not self._is_rehearsal and (not torch.is_grad_enabled() or _has_saved_tensor_hooks())
        if self._has_read_number or draws_again:
            raise UnknownOperatorError
        dim = self._find_sample_dim(self.pattern, operator, values) if self.is_known else None
        if dim is None:
            self.is_known = False
            fill(values)
            return
        self._fill_along(dim, values, fill)
        order = tuple(sorted(range(values.dim()), key=values.stride, reverse=True))
        self.pattern += (Draw(operator, values.dim(), dim, order, 1 in self._shards.sizes),)

    def _fill_along(self, dim: int, values: Tensor, fill: Fill) -> None:
        sizes = self._shards.sizes
        rows, remainder = divmod(values.shape[dim], sum(sizes))
        if remainder or (dim and not values.is_contiguous()):
            raise UnknownOperatorError
        lengths = [size * rows for size in sizes]
        fills = [fill] * len(sizes)
        takes_turns = self._shards.are_interleaved
        if fill.probabilities is not None:
            given = fill.probabilities
            if takes_turns:  # back into one part after the other
                given = given.index_select(dim, taking_turns(sizes[0], len(sizes), rows, values.device))
            fills = [replace(fill, probabilities=part) for part in given.split(lengths, dim)]
        apart = torch.empty_like(values) if takes_turns else values
        for number, part in enumerate(apart.split(lengths, dim)):
            # A tensor that lies in memory as that of a single shard does: the order of its numbers may depend on it.
            own = part if dim == 0 else torch.empty_like(part, memory_format=torch.contiguous_format)
            self._fill_shard(number, own, fills[number])
            if own is not part:
                part.copy_(own)
        if takes_turns:
            order = taking_turns(len(sizes), sizes[0], rows, values.device)
            torch.index_select(apart, dim, order, out=values)


class ShardDraws:
    """The random draws of a loss function, and of the models that it calls, as far as this worker has seen them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators: list[torch.Generator] = []
        self._functions = WatchedFunctions()
        self._patterns: set[Pattern] = set()

    def shared_pass(self, shards: ShardRange, seed_of: SeedOfShard) -> SharedPass:
        """A context for the forward pass of several shards."""
        generators = self._generators_of(shards, seed_of)
        return SharedPass(shards, generators, self._functions, self._find_sample_dim)

    def knows(self, made: SharedPass) -> bool:
        """Whether the draws of a pass have been learned; one without draws needs none."""
        return made.is_known and (not made.pattern or made.pattern in self._patterns)

    def learn(self, pattern: Pattern) -> None:
        """Take the draws of a rehearsal for right."""
        self._patterns.add(pattern)

    def single_rehearsal(
        self, shard: ShardRange, seed_of: SeedOfShard, *, inverts_answers: bool = False
    ) -> SingleShardRehearsal:
        """A context for the forward pass of one shard."""
        generators = self._generators_of(shard, seed_of)
        return SingleShardRehearsal(generators, self._functions, inverts_answers=inverts_answers)

    def shared_rehearsal(
        self, shards: ShardRange, seed_of: SeedOfShard, singles: Sequence[SingleShardRehearsal]
    ) -> SharedPass:
        """A context for the forward pass of several shards.

        Args:
            singles: the rehearsal of each of them.
        """
        find = functools.partial(_rehearsed_sample_dim, [one.draws for one in singles], shards.sizes)
        generators = self._generators_of(shards, seed_of)
        return SharedPass(shards, generators, self._functions, find, is_rehearsal=True)

    def one_number(self, shard: ShardRange) -> OneNumber:
        """A context for a forward pass in which random numbers make no difference between samples."""
        return OneNumber(self._generators_of(shard, lambda _shard: 0), self._functions, is_rehearsal=True)

    def _generators_of(self, shards: ShardRange, seed_of: SeedOfShard) -> Generators:
        while len(self._generators) < len(shards.sizes):
            self._generators.append(torch.Generator(self._device))
        return [(self._generators[number], seed_of(shards.first_shard + number)) for number in range(len(shards.sizes))]

    def _find_sample_dim(self, before: Pattern, operator: str, values: Tensor) -> int | None:
        place = len(before)
        continued = [one[place] for one in self._patterns if len(one) > place and one[:place] == before]
        dims = {one.sample_dim for one in continued if (one.operator, one.num_dims) == (operator, values.dim())}
        return dims.pop() if len(dims) == 1 else None


def _rehearsed_sample_dim(
    singles: Sequence[Sequence[SingleDraw]], sizes: Sequence[int], before: Pattern, operator: str, values: Tensor
) -> int | None:
    """The dimension in which a tensor is as long as those of single shards in a row, each sample with as many rows."""
    place = len(before)
    if any(len(draws) <= place or draws[place].operator != operator for draws in singles):
        return None
    shapes = [draws[place].shape for draws in singles]
    if any(len(shape) != values.dim() for shape in shapes):
        return None
    found = []
    for dim, length in enumerate(values.shape):
        rows = length // sum(sizes)
        along = [shape[dim] for shape in shapes]
        across = {(*shape[:dim], *shape[dim + 1 :]) for shape in (values.shape, *shapes)}
        if rows * sum(sizes) == length and along == [rows * size for size in sizes] and len(across) == 1:
            found.append(dim)
    return found[0] if len(found) == 1 else None


def _has_saved_tensor_hooks() -> bool:
    """Whether someone sees to what autograd keeps for backward, as activation checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
