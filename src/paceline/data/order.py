"""Which samples form which batch: a pure function of (seed, epoch, batch number).

Without a sampler it is a permutation. A torch sampler, or a function of seed and epoch, is listed once an epoch by
every worker for itself, with the generators seeded by (seed, epoch): one that draws from them gives all workers the
same order, in a resumed run too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.randomness import Purpose, generators_in, global_generators_kept, key, permuted, seed_generators
from paceline.errors import DataError

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
        self._key = seed, Purpose.ORDER, epoch
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


def check_sampler(sampler: Any) -> None:
    """Raises `DataError` if it gives each worker other samples, or is neither a sampler nor a function."""
    for part in _parts(sampler):
        if hasattr(part, "num_replicas") and hasattr(part, "rank"):
            raise DataError(
                f"{type(part).__name__} gives each worker samples of its own, which Paceline does itself; leave it "
                "out, or give the sampler of the whole data set."
            )
    if not callable(sampler) and not hasattr(sampler, "__iter__"):
        raise DataError(
            f"The sampler is a {type(sampler).__name__}; give a torch Sampler or BatchSampler, or a function of "
            "(seed, epoch) that returns the numbers of samples."
        )


def listed_order(
    sampler: Any, set_size: int, global_batch_size: int, seed: int, epoch: int, *, drop_last: bool = False
) -> ListedOrder:
    """An epoch's order by `sampler`: its samples in global batches, or its batches as they are.

    Raises:
        DataError: no samples, or one that the data set of `set_size` does not have.
    """
    with global_generators_kept():
        # They would else go on where the epoch before ended, which a resumed run has not gone through.
        seed_generators(key(seed, Purpose.SAMPLER, epoch, 0), generators_in(sampler))
        for part in _parts(sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        is_function = callable(sampler) and not hasattr(sampler, "__iter__")
        items = list(sampler(seed, epoch) if is_function else sampler)
    try:
        if items and np.ndim(items[0]) == 0:
            samples = np.fromiter(map(int, items), np.int64)
            order = ListedOrder.of_size(samples, global_batch_size, drop_last=drop_last)
        else:
            batches = [np.fromiter(map(int, batch), np.int64) for batch in items]
            samples = np.concatenate([np.empty(0, np.int64), *batches])
            order = ListedOrder(samples, np.cumsum([len(batch) for batch in batches if len(batch)]))
    except (TypeError, ValueError) as problem:
        raise DataError(f"The sampler gave something that is not the number of a sample ({problem}).") from None
    if not len(samples):
        raise DataError(f"The sampler gave no sample for epoch {epoch}.")
    if samples.min() < 0 or samples.max() >= set_size:
        wrong = samples.min() if samples.min() < 0 else samples.max()
        raise DataError(f"The sampler gave the sample {wrong} in epoch {epoch}; the data set has {set_size:,} samples.")
    return order


def _parts(sampler: Any) -> Iterator[Any]:
    """The sampler, and those that it draws from: a BatchSampler keeps one as `sampler`."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)
