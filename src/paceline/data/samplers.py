"""The order of samples that a torch sampler gives, or a function of seed and epoch: listed once an epoch.

Every worker lists it for itself, with the global generators seeded by (seed, epoch). So a sampler that draws from them
gives all workers the same order, in a resumed run too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import counter_random, random_streams
from paceline.data.generators import global_generators_kept, seed_global_generators
from paceline.data.order import ListedOrder
from paceline.errors import DataError
from paceline.own_generators import OwnGenerators

_INNER = ("sampler", "batch_sampler")
"""Where samplers keep those that they draw from."""


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
    with global_generators_kept(), _own_generators_seeded(sampler, seed, epoch):
        seed_global_generators(counter_random.key(seed, random_streams.SAMPLER, epoch, 0))
        for part in _parts(sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        is_function = callable(sampler) and not hasattr(sampler, "__iter__")
        items = iter(sampler(seed, epoch) if is_function else sampler)
        first = next(items, None)
        everything = itertools.chain([] if first is None else [first], items)
        if first is None or isinstance(first, int | np.integer) or (isinstance(first, torch.Tensor) and not first.ndim):
            samples = np.fromiter((int(item) for item in everything), np.int64)
            order = ListedOrder.of_size(samples, global_batch_size, drop_last=drop_last)
        else:
            batches = [np.fromiter((_number(item) for item in batch), np.int64) for batch in everything]
            samples = np.concatenate(batches)
            order = ListedOrder(samples, np.cumsum([len(batch) for batch in batches if len(batch)]))
    _check(samples, set_size, epoch)
    return order


def _number(item: Any) -> int:
    try:
        return int(item)
    except (TypeError, ValueError):
        raise DataError(f"A sampler gave {item!r} where the number of a sample is needed.") from None


def _check(samples: NDArray[np.int64], set_size: int, epoch: int) -> None:
    if not len(samples):
        raise DataError(f"The sampler gave no sample for epoch {epoch}.")
    if samples.min() < 0 or samples.max() >= set_size:
        wrong = int(samples.min() if samples.min() < 0 else samples.max())
        raise DataError(
            f"The sampler gave the sample {wrong} for epoch {epoch}; the data set has {set_size:,} samples."
        )


def _parts(sampler: Any) -> Iterator[Any]:
    """The sampler, and the samplers that it draws from."""
    seen: set[int] = set()
    left = [sampler]
    while left:
        part = left.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if hasattr(part, "__dict__"):
            left += [vars(part).get(name) for name in _INNER]


@contextlib.contextmanager
def _own_generators_seeded(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """A context for an epoch, in which the generators of samplers begin anew; those that torch's samplers take from the
    seed that the script gave them.

    They would else continue where the epoch before ended, which a resumed run has not gone through.
    """
    parts = list(_parts(sampler))
    own = OwnGenerators(*parts)
    given = [part.generator for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
    script_seeds = [generator.initial_seed() & 0x7FFFFFFFFFFFFFFF for generator in given]
    with own.kept():
        own.seed(counter_random.key(seed, random_streams.SAMPLER, epoch, 2))
        for generator, script_seed in zip(given, script_seeds, strict=True):
            generator.manual_seed(counter_random.key(script_seed, random_streams.SAMPLER, epoch, 1))
        yield
