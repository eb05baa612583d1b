"""Random numbers: hashes of their keys, permutations that are never stored, and the generators of a script.

What is drawn depends on its key alone, never on who draws it or when: every draw is a hash of (seed, what it is for,
epoch, sample index), so a sample looks the same whichever worker processes it and however many workers there are. The
hash is SplitMix64, drawn from once per key part.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import types
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.mathematics import GOLDEN, split_mix

_NUM_ROUNDS = 16
"""Enough for all permutations of a few numbers to come equally often; large sets would need fewer."""
_ROUND_BITS = 40
"""A round's hashes begin at multiples of 2**40, more than any half of a data set's numbers."""

_DEEPEST, _LONGEST = 6, 64
"""Levels of attributes that are looked through for generators, and entries of a list; a longer one is a list of
samples."""


class Purpose(IntEnum):
    """What random numbers are drawn for, so that no two uses ever share them."""

    ORDER = 1
    CROP_Y = 2
    CROP_X = 3
    FLIP = 4
    CUTOUT_Y = 5
    CUTOUT_X = 6
    SAMPLE = 7
    FORWARD = 8
    BETWEEN_STEPS = 9
    EVALUATION = 11
    SAMPLER = 12
    COLLATE = 13
    COLLATE_EVALUATION = 14
    LATER_STEP = 16
    UPDATE = 17
    IN_LOOP = 18


# --- hashes of keys ---


def _state(*parts: int) -> int:
    state = 0
    for part in parts:
        state = split_mix(state + part, 0)
    return state


def hash_keys(seed: int, purpose: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 random bits for each index, in the shape of `indices`."""
    found: NDArray[np.uint64] = split_mix(_state(seed, purpose, epoch), indices.astype(np.uint64))
    return found


def uniform(seed: int, purpose: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each index."""
    return (hash_keys(seed, purpose, epoch, indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(seed: int, purpose: int, epoch: int, indices: NDArray[np.int64], high: int) -> NDArray[np.int64]:
    """A number in 0 … high - 1 for each index, in the shape of `indices` (bias below high / 2**53)."""
    return (uniform(seed, purpose, epoch, indices) * high).astype(np.int64)


def on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Numbers that the host knows, in their shape, on a device.

    On a GPU they come in the order of its stream, by way of pinned memory, and the host does not wait.
    """
    tensor = torch.as_tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def key(seed: int, purpose: int, epoch: int, index: int) -> int:
    """One 63-bit seed for a generator, of torch or Python, that belongs to one thing."""
    # `hash_keys` of one index: in Python's numbers a tenth of the time of arrays of length one.
    bits: int = split_mix(_state(seed, purpose, epoch), index)
    return bits >> 1


# --- a permutation that is computed where it is needed ---


def permuted(positions: NDArray[np.int64], num_samples: int, seed: int, purpose: int, epoch: int) -> NDArray[np.int64]:
    """The numbers, in the shape of `positions`, at these positions of a permutation of 0 … `num_samples` - 1, whose key
    the other arguments are.

    A keyed Feistel network on pairs (left, right) with left < a and right < b, whose halves take turns in adding a hash
    of the other one, modulo a or b: a bijection of a * b numbers for any hash. What falls on n or above goes through
    the network again until it does not ("cycle walking"), which makes it a bijection of 0 … n - 1 (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5). Here a is the first even number above the
    root of n - 1, and a * b exceeds n by less than a, so about one number in a root of n walks further. (Were both odd,
    every round would be an even permutation, and half of all permutations never come.)
    """
    left_size = 2 * (math.isqrt(max(num_samples, 1) - 1) // 2 + 1)
    right_size = -(-num_samples // left_size)

    def through_network(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        right, left = np.divmod(numbers, left_size)
        for round_ in range(_NUM_ROUNDS):
            hashes = hash_keys(seed, purpose, epoch, (left if round_ % 2 else right) + (round_ << _ROUND_BITS))
            if round_ % 2:
                right = (right + (hashes % np.uint64(right_size)).astype(np.int64)) % right_size
            else:
                left = (left + (hashes % np.uint64(left_size)).astype(np.int64)) % left_size
        return right * left_size + left

    found = through_network(positions)
    while len(outside := np.flatnonzero(found >= num_samples)):
        found[outside] = through_network(found[outside])
    return found


# --- the global generators of Python, NumPy and torch, and those that data sets and samplers hold ---


RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator that a script has of its own."""


def seed_all(seed: int, own: Iterable[RandomGenerator] = ()) -> None:
    """Seed the three global generators by a 63-bit number, and each of a script's `own` by another one that follows
    from it. Of torch's only the CPU's is seeded, since a forked process must not call CUDA."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(own, 1):
        other = (seed + number * GOLDEN) % 2**63
        if isinstance(generator, torch.Generator):
            generator.manual_seed(other)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(other).state
        else:
            generator.seed(other % 2**32)


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """After the block the three global generators are in the states that they had before it."""
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
