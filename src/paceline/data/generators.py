"""The global generators of Python, NumPy and torch, and those that data sets and samplers hold."""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator that a script has of its own."""

_DEEPEST, _LONGEST = 6, 64
"""Levels of attributes that are looked through, and entries of a list; a longer one is a list of samples."""


def seed_global_generators(seed: int) -> None:
    """Seed all three by a 63-bit number; torch's for the CPU alone, since a forked process must not call CUDA."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """Afterwards the generators are in the states in which they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def generators_in(*holders: Any) -> list[RandomGenerator]:
    """The generators that data sets, transforms and samplers hold in attributes, and that those in these hold.

    `self.rng = np.random.default_rng(0)` goes on from draw to draw: what it draws depends on how much of the work a
    process does, unless it is seeded for each sample. Those that code reaches by other ways, as closures and global
    variables, are not looked for.
    """
    found: list[RandomGenerator] = []
    seen: dict[int, Any] = {id(torch.default_generator): None}
    left = [(holder, _DEEPEST) for holder in holders]
    while left:
        thing, depth = left.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | random.SystemRandom):
            continue
        seen[id(thing)] = thing  # which keeps it alive, and its id its own
        if isinstance(thing, RandomGenerator):
            found.append(thing)
        elif depth:
            left += [(part, depth - 1) for part in _parts(thing)]
    return found


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, list | tuple):
        return thing if len(thing) <= _LONGEST else ()
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, types.MethodType):
        return (thing.__self__,)
    children = thing.children() if isinstance(thing, nn.Module) else ()
    return (*children, *(vars(thing).values() if hasattr(thing, "__dict__") else ()))


def seed_generators(generators: list[RandomGenerator], seed: int) -> None:
    """Seed each by a number of its own."""
    for number, generator in enumerate(generators, 1):
        own = (seed + number * 0x9E3779B97F4A7C15) % 2**63
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        else:
            generator.seed(own % 2**32)


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
