"""Which samples form which batch: a pure function of (seed, epoch, batch number)."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from paceline.data import random_streams
from paceline.data.permutation import permuted

_BLOCK = 16384
"""Positions of a permutation that are computed at once: many batches', for the price of a few."""


class ShuffledOrder:
    """All samples of a set once, in the order of a permutation that is never stored, in batches of one size."""

    def __init__(
        self, set_size: int, global_batch_size: int, seed: int, epoch: int, *, drop_last: bool = False
    ) -> None:
        """
        Args:
            set_size: the number of samples in the data set.
            drop_last: leave out the samples of a last batch that would be short.
        """
        self._set_size = set_size
        self._batch_size = global_batch_size
        self._key = seed, random_streams.ORDER, epoch
        self.num_batches = set_size // global_batch_size if drop_last else -(-set_size // global_batch_size)
        self.num_samples = min(set_size, self.num_batches * global_batch_size)
        """How many samples all batches have together."""
        self._block: tuple[int, NDArray[np.int64]] = 0, np.empty(0, np.int64)
        """The block computed last, and the position it begins at; asynchronous servers ask from several threads."""

    def batch(self, number: int) -> NDArray[np.int64]:
        """The numbers, in their data set, of the samples of global batch `number`: [num_samples]."""
        start = number * self._batch_size
        stop = min(start + self._batch_size, self.num_samples)
        first, block = self._block
        if not first <= start <= stop <= first + len(block):
            end = min(start + max(_BLOCK, self._batch_size), self.num_samples)
            first, block = start, permuted(np.arange(start, end), self._set_size, *self._key)
            self._block = first, block
        return block[start - first : stop - first]

    def digest(self) -> str:
        """A fingerprint, equal for equal orders; of what determines them, instead of millions of numbers."""
        seed, _, epoch = self._key
        return digest_of(f"shuffled: {self._set_size} samples, {self.num_samples} of them, seed {seed}, epoch {epoch}")


class ListedOrder:
    """Batches of listed samples: what a sampler gave, or a function of seed and epoch."""

    def __init__(self, samples: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """
        Args:
            samples: the numbers of the samples of all batches, one after the other.
            ends: where each batch ends in them.
        """
        self._samples = samples
        self._ends = ends
        self.num_samples = len(samples)
        """One that comes twice counts twice."""
        self.num_batches = len(ends)

    @classmethod
    def of_size(cls, samples: NDArray[np.int64], batch_size: int, *, drop_last: bool = False) -> ListedOrder:
        """Batches of one size of `samples`, [num_samples]; the last may be short, unless `drop_last` leaves it out."""
        if drop_last:
            samples = samples[: len(samples) // batch_size * batch_size]
        ends = np.minimum(np.arange(batch_size, len(samples) + batch_size, batch_size), len(samples))
        return cls(samples, ends)

    def batch(self, number: int) -> NDArray[np.int64]:
        start = self._ends[number - 1] if number > 0 else 0
        return self._samples[start : self._ends[number]]

    def digest(self) -> str:
        return digest_of(self._samples.astype("<i8").tobytes() + self._ends.astype("<i8").tobytes())


EpochOrder = ShuffledOrder | ListedOrder
"""The global batches of one epoch: the same on every worker."""


def digest_of(content: str | bytes) -> str:
    """A short fingerprint."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]
