"""Generators of random numbers that a data set, a stream or a sampler has in its attributes, beside the global ones.

`self.rng = np.random.default_rng(0)` goes on from draw to draw, so what it draws depends on how much of the work a
worker does. Such generators are seeded wherever the global ones are. Those that code reaches by other ways, as closures
and global variables, are not looked for.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST_TRANSFORMS = 64
"""A longer list is one of samples."""

_DEEPEST = 6
"""Levels of data sets in data sets, and of transforms."""

RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class OwnGenerators:
    """The generators that some things have in attributes, and their parts in theirs."""

    def __init__(self, *holders: object) -> None:
        self._all = list(_generators_in(holders))

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


def _generators_in(holders: Iterable[object]) -> Iterator[Any]:
    left = [(holder, _DEEPEST) for holder in holders]
    seen: dict[int, object] = {}
    while left:
        thing, depth = left.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | random.SystemRandom):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, RandomGenerator):
            if thing is not torch.default_generator:
                yield thing
        elif depth:
            left += [(part, depth - 1) for part in _parts(thing)]


def _parts(thing: Any) -> Iterable[object]:
    """What a thing has that may be or have a generator: other data sets, transforms, and short lists of these."""
    if isinstance(thing, list | tuple):
        return thing if len(thing) <= _MOST_TRANSFORMS else ()
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, types.MethodType):
        return (thing.__self__,)
    children = tuple(thing.children()) if isinstance(thing, nn.Module) else ()
    attributes = vars(thing).values() if hasattr(thing, "__dict__") else ()
    return (
        *children,
        *(one for one in attributes if isinstance(one, RandomGenerator) or callable(one) or _is_data(one)),
    )


def _is_data(thing: object) -> bool:
    return hasattr(thing, "__getitem__") or hasattr(thing, "__iter__")
