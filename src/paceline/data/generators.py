"""The global generators of Python, NumPy and torch, and those that data sets and samplers hold."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.own_generators import RandomGenerator

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
    process does, unless it is seeded for each sample.
    """
    found: dict[int, RandomGenerator] = {}
    seen: dict[int, Any] = {}
    left = [(holder, _DEEPEST) for holder in holders]
    while left:
        thing, depth = left.pop()
        if isinstance(thing, RandomGenerator):
            found[id(thing)] = thing
        elif depth and id(thing) not in seen and not isinstance(thing, type):
            seen[id(thing)] = thing  # which keeps it alive, and its id its own
            if isinstance(thing, list | tuple):
                parts = list(thing) if len(thing) <= _LONGEST else []
            else:
                parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
            left += [(part, depth - 1) for part in parts]
    return list(found.values())


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
