"""Generators of random numbers that a data set, a stream or a sampler has of its own, beside the global ones.

`rng = np.random.default_rng(0)` in an attribute goes on from draw to draw, so what it draws depends on how much of the
work a worker does. Such generators are found where the user's code keeps them, and seeded wherever the
global ones are.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST_TRANSFORMS = 64
"""A longer list is one of samples."""

RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_METHODS = ("__call__", "__getitem__", "__getitems__", "__iter__")
"""Methods whose code may draw random numbers, of a user's data sets, transforms, samplers and streams."""


class OwnGenerators:
    """The generators that some things hold, or name in their code: in attributes, closures and global variables."""

    def __init__(self, *holders: object, of_parts: bool = False) -> None:
        """
        Args:
            of_parts: whether those of what an object holds count too, as of a data set's transforms.
        """
        parts = _parts_of_data if of_parts else _parts
        self._all = [one for one in _generators_in(holders, 6 if of_parts else 4, parts) if not _is_global(one)]

    def seed(self, seed: int) -> None:
        """Seed each with a seed of its own."""
        for number, one in enumerate(self._all, 1):
            own = (seed + number * 0x9E3779B97F4A7C15) % 2**63
            if isinstance(one, torch.Generator):
                one.manual_seed(own)
            elif isinstance(one, np.random.Generator):
                one.bit_generator.state = type(one.bit_generator)(own).state
            else:
                one.seed(own % 2**32)

    def full_states(self) -> list[Any]:
        """What `set_states` goes back to."""
        return [full_state(one) for one in self._all]

    def set_states(self, states: Sequence[Any]) -> None:
        for one, state in zip(self._all, states, strict=True):
            set_state(one, state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context after which they are as before, so that what the script draws elsewhere is alike on all workers."""
        before = self.full_states()
        try:
            yield
        finally:
            self.set_states(before)


def full_state(generator: RandomGenerator) -> Any:
    """What `set_state` goes back to."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: RandomGenerator, state: Any) -> None:
    """Have a generator go on from where `full_state` found it."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _generators_in(holders: Iterable[object], depth: int, parts: Callable[[object], Iterator[object]]) -> Iterator[Any]:
    """The generators that `holders` are, hold, or can reach by a name in their code."""
    left = [(holder, depth) for holder in holders]
    seen: dict[int, object] = {}
    while left:
        thing, depth = left.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, RandomGenerator):
            yield thing
        elif depth:
            left += [(part, depth - 1) for part in parts(thing)]


def _parts(thing: Any) -> Iterator[object]:
    """What a thing has, as far as code of a user's keeps generators there."""
    if isinstance(thing, nn.Module):
        modules = list(thing.modules())
        values = (value for module in modules for value in vars(module).values())
        yield from (value for value in values if isinstance(value, RandomGenerator))
        # In an order that is the same on all workers, as each generator is seeded by its number.
        yield from dict.fromkeys(vars(type(module)).get("forward") for module in modules)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from reached_by(thing)
    elif hasattr(thing, "__dict__"):
        yield from (value for value in vars(thing).values() if isinstance(value, RandomGenerator))
        yield from (getattr(type(thing), name, None) for name in _METHODS)


def _parts_of_data(thing: Any) -> Iterator[object]:
    """The same of a data set or a collate function: its parts are other sets, transforms, and short lists of these."""
    if isinstance(thing, list | tuple):
        yield from thing if len(thing) <= _MOST_TRANSFORMS else ()
        return
    yield from _parts(thing)
    if not isinstance(thing, nn.Module | types.FunctionType | types.MethodType) and hasattr(thing, "__dict__"):
        for value in vars(thing).values():
            if isinstance(value, list | tuple) or callable(value) or hasattr(value, "__getitem__"):
                yield value


def reached_by(function: types.FunctionType) -> Iterator[object]:
    """What a function's code, and that of functions inside it, can name."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # still empty
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]


def _is_global(generator: object) -> bool:
    """Whether it is one that `seed_generators` seeds, or has no state."""
    known = (random._inst, np.random.mtrand._rand, torch.default_generator)
    return any(generator is one for one in known) or isinstance(generator, random.SystemRandom)
