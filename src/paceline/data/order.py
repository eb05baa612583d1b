"""Which samples form which batch: a pure function of (seed, epoch, batch number)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data import streams
from paceline.data.counter_random import hash_keys


@dataclass(frozen=True)
class EpochOrder:
    """The samples of one epoch in the order they are visited, cut into global batches; the last may be short."""

    indices: NDArray[np.int64]
    global_batch_size: int

    @property
    def num_batches(self) -> int:
        return -(-len(self.indices) // self.global_batch_size)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Sample indices of global batch `number`."""
        start = number * self.global_batch_size
        return self.indices[start : start + self.global_batch_size]


def epoch_order(num_samples: int, global_batch_size: int, seed: int, epoch: int) -> EpochOrder:
    """A permutation of all samples: sorted by a hash of their index, so it is the same on every machine."""
    hashes = hash_keys(seed, streams.ORDER, epoch, np.arange(num_samples, dtype=np.int64))
    return EpochOrder(np.argsort(hashes, kind="stable").astype(np.int64), global_batch_size)
