"""A random permutation of 0 … n - 1 that is computed where it is needed, and never stored.

A keyed Feistel network on pairs (left, right) with left < a and right < b, whose halves take turns in adding a hash of
the other one, modulo a or b: a bijection of a * b numbers for any hash. What falls on n or above goes through the
network again until it does not ("cycle walking"), which makes it a bijection of 0 … n - 1. Both are from Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 (cycle walking) and 5 (FE1). Here a is the
first even number above the root of n - 1, and a * b exceeds n by less than a, so about one number in a root of n walks
further. (Were both a and b odd, every round would be an even permutation, and half of all permutations never come.)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.data.counter_random import hash_keys

_NUM_ROUNDS = 16
"""Enough for all permutations of a few numbers to come equally often; large sets would need fewer."""

_ROUND_BITS = 40
"""A round's hashes begin at multiples of 2**40, more than any half of a data set's numbers."""


def permuted(positions: NDArray[np.int64], num_samples: int, seed: int, stream: int, epoch: int) -> NDArray[np.int64]:
    """The numbers, in the shape of `positions`, at these positions of a permutation of 0 … `num_samples` - 1.

    The other arguments are its key.
    """
    left_size = 2 * (math.isqrt(max(num_samples, 1) - 1) // 2 + 1)
    right_size = -(-num_samples // left_size)
    found = _network(positions, left_size, right_size, seed, stream, epoch)
    outside = np.flatnonzero(found >= num_samples)
    while len(outside):
        found[outside] = _network(found[outside], left_size, right_size, seed, stream, epoch)
        outside = outside[found[outside] >= num_samples]
    return found


def _network(
    numbers: NDArray[np.int64], left_size: int, right_size: int, seed: int, stream: int, epoch: int
) -> NDArray[np.int64]:
    right, left = np.divmod(numbers, left_size)
    for round_ in range(_NUM_ROUNDS):
        hashes = hash_keys(seed, stream, epoch, (left if round_ % 2 else right) + (round_ << _ROUND_BITS))
        if round_ % 2:
            right = (right + (hashes % np.uint64(right_size)).astype(np.int64)) % right_size
        else:
            left = (left + (hashes % np.uint64(left_size)).astype(np.int64)) % left_size
    return right * left_size + left
