"""The order of samples that a torch sampler gives, or a function of seed and epoch: listed once an epoch.

Every worker lists it for itself, with the generators seeded by (seed, epoch). So a sampler that draws from them
gives all workers the same order, in a resumed run too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.data import counter_random, random_streams
from paceline.data.generators import generators_in, global_generators_kept, seed_generators, seed_global_generators
from paceline.data.order import ListedOrder
from paceline.errors import DataError


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
        seed_global_generators(counter_random.key(seed, random_streams.SAMPLER, epoch, 0))
        seed_generators(generators_in(sampler), counter_random.key(seed, random_streams.SAMPLER, epoch, 1))
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
