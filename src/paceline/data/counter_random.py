"""Randomness as a pure function: what is drawn depends on its key alone, never on who draws it or when.

Every draw is a hash of (seed, stream, epoch, sample index), so a sample looks the same whichever worker
processes it and however many workers there are. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood:
"Fast splittable pseudorandom number generators", OOPSLA 2014), applied once per key part.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _state(*parts: int) -> int:
    state = 0
    for part in parts:
        state = _mix((state + _GOLDEN + part) & _MASK)
    return state


def hash_keys(seed: int, stream: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 random bits for each index, shape of `indices`. `stream` keeps independent uses apart."""
    state = _state(seed, stream, epoch)
    # The same mix for all indices at once, in place: this is on the path of every batch.
    x = indices.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(state)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    return x


def uniform(seed: int, stream: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """One draw in [0, 1) for each index."""
    return (hash_keys(seed, stream, epoch, indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(seed: int, stream: int, epoch: int, indices: NDArray[np.int64], high: int) -> NDArray[np.int64]:
    """One draw in 0 … high - 1 for each index, in the shape of `indices` (bias below high / 2**53)."""
    return (uniform(seed, stream, epoch, indices) * high).astype(np.int64)


def key(seed: int, stream: int, epoch: int, index: int) -> int:
    """One 63-bit seed for a generator, of torch or Python, that belongs to one thing."""
    # `hash_keys` of one index: in Python's numbers a tenth of the time of arrays of length one.
    return _mix((_state(seed, stream, epoch) + (index + 1) * _GOLDEN) & _MASK) >> 1
