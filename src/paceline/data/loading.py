"""`Loading`: a data set, which of its samples form which batch, and how they become batches; also as a DataLoader says.

Which samples form a batch is a pure function of (seed, epoch, batch number). Without a sampler it is a permutation. A
torch sampler, or a function of seed and epoch, is listed once an epoch by every worker for itself, with the generators
seeded by (seed, epoch): one that draws from them gives all workers the same order, in a resumed run too.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from paceline.data.randomness import Purpose, generators_in, global_generators_kept, key, permuted, seed_all
from paceline.errors import DataError

Collate = Callable[[list[Any]], Any]
"""Makes the content of a batch from a list of samples."""
_BLOCK = 16384
"""Positions of a permutation that are computed at once: many batches', for the price of a few."""


class MapDataset(Protocol):
    """What torch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def collated(samples: list[Any]) -> Any:
    """Samples as torch collates them by default; None for none. Raises `DataError` if they do not fit together."""
    try:
        return default_collate(samples) if samples else None
    except (RuntimeError, TypeError) as problem:
        raise DataError(
            f"Samples cannot be collated by torch's default ({str(problem).splitlines()[0].rstrip('.')}); give "
            "run.batches a collate_fn, which may pad them."
        ) from None


@dataclass(frozen=True, eq=False)
class Loading:
    """How the samples of a data set are visited, read and collated."""

    dataset: Any
    collate_fn: Collate = collated
    """Called for one virtual shard's samples at a time."""
    sampler: Any = None
    """A torch Sampler or BatchSampler, or a function of (seed, epoch); None: all samples, shuffled by the seed."""
    drop_last: bool = False
    """Leave out the samples of an epoch's last batch if it would be short."""
    num_workers: int = 0
    """Loader processes of each worker."""
    worker_init_fn: Callable[[int], Any] | None = None
    pin_memory: bool | None = None
    """None: where the device is a GPU."""
    prefetch_factor: int | None = None
    timeout: float = 0
    """Seconds to wait for a loader process; 0: for ever."""
    multiprocessing_context: Any = None
    batch_size: int | None = None
    """Samples that are evaluated together; None: as the job says."""

    @classmethod
    def of(cls, dataset: Any, global_batch_size: int, purpose: str = "training", **given: Any) -> Self:
        """How `dataset` is read; what a DataLoader says is taken over, unless it is given here. Raises `DataError`
        where something that a DataLoader says cannot be so, or a sampler gives each worker other samples."""
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(dataset, DataLoader):
            loading = dataclasses.replace(cls._of_loader(dataset, global_batch_size, purpose), **given)
        else:
            loading = cls(dataset, **given)
        if loading.collate_fn is default_collate:
            loading = dataclasses.replace(loading, collate_fn=collated)
        if loading.sampler is not None and is_stream(loading.dataset):
            raise DataError("A stream has an order of its own; leave the sampler out, or give a map-style set.")
        if loading.sampler is not None:
            check_sampler(loading.sampler)
        return loading

    @classmethod
    def _of_loader(cls, loader: DataLoader[Any], global_batch_size: int, purpose: str) -> Self:
        """The settings of a DataLoader. `shuffle=True` means the job's own order."""
        if loader.batch_size is None and loader.batch_sampler is None:
            raise DataError(
                f"The {purpose} DataLoader has batch_size=None, so its batches cannot be divided among workers; "
                "give a data set of single samples and a batch size."
            )
        if purpose == "training" and loader.batch_size not in (None, global_batch_size):
            raise DataError(
                f"The DataLoader has batch_size={loader.batch_size} and the job global_batch_size={global_batch_size}; "
                "set both to the number of samples that all workers together train on in one step."
            )
        sampler: Any = loader.batch_sampler
        if loader.batch_size is not None:
            sampler = None if _is_shuffle(loader) or is_stream(loader.dataset) else loader.sampler
        names = ("collate_fn", "drop_last", "num_workers", "worker_init_fn", "prefetch_factor", "timeout", "batch_size")
        given = {name: getattr(loader, name) for name in (*names, "multiprocessing_context")}
        return cls(loader.dataset, sampler=sampler, pin_memory=loader.pin_memory or None, **given)

    def order(self, set_size: int, global_batch_size: int, seed: int, epoch: int) -> EpochOrder:
        """The order of an epoch in training. Raises `DataError` where it has no batch."""
        order: EpochOrder
        if self.sampler is None:
            order = ShuffledOrder(set_size, global_batch_size, seed, epoch, drop_last=self.drop_last)
        else:
            order = listed_order(self.sampler, set_size, global_batch_size, seed, epoch, drop_last=self.drop_last)
        if not order.num_batches:
            raise DataError(
                f"drop_last=True leaves no batch of epoch {epoch}, which has fewer than global_batch_size = "
                f"{global_batch_size} samples; give drop_last=False, or a smaller global_batch_size."
            )
        return order

    def evaluation_order(self, set_size: int, batch_size: int, seed: int) -> EpochOrder:
        """The chunks in which the set is evaluated: all its samples, or those of the sampler. Raises `DataError` where
        some samples would be left out."""
        self.check_whole()
        batch_size = self.batch_size or batch_size
        if self.sampler is None or type(self.sampler) is SequentialSampler:
            return ListedOrder.of_size(np.arange(set_size), batch_size)
        return listed_order(self.sampler, set_size, batch_size, seed, 0)

    def check_whole(self) -> None:
        """Raises `DataError` where the last samples of an evaluation would be left out."""
        if self.drop_last:
            raise DataError("An evaluation counts every sample once; give its DataLoader drop_last=False.")


def set_size(dataset: Any, what: str, alternative: str = "") -> int:
    """The number of samples in a map-style data set. Raises `DataError` if it has none, or is none.

    Args:
        what: names it in messages.
        alternative: what may be given in its place.
    """
    kind = type(dataset)
    what = f"{what}, of type {kind.__name__},"
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise DataError(f"{what} lacks a length or samples by number; give a map-style data set{alternative}.")
    if not len(dataset):
        raise DataError(f"{what} has no samples.")
    return len(dataset)


def is_stream(dataset: Any) -> bool:
    """Whether a data set gives samples one after the other, and none by its number."""
    has_numbers = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_numbers)


def _is_shuffle(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler is what `shuffle=True` makes: every sample once, at random."""
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, loader.dataset))
    )


# --- the order of an epoch ---


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
    for part in _samplers_in(sampler):
        if hasattr(part, "num_replicas") and hasattr(part, "rank"):
            raise DataError(
                f"{type(part).__name__} gives each worker samples of its own, as Paceline itself does; leave it out."
            )
    if not callable(sampler) and not hasattr(sampler, "__iter__"):
        raise DataError(
            f"The sampler is a {type(sampler).__name__}; give a torch Sampler or BatchSampler, or a function of "
            "(seed, epoch) that returns the numbers of samples."
        )


def listed_order(
    sampler: Any, set_size: int, global_batch_size: int, seed: int, epoch: int, *, drop_last: bool = False
) -> ListedOrder:
    """An epoch's order by `sampler`: its samples in global batches, or its batches as they are. Raises `DataError`
    where it gives no sample, or one that the data set of `set_size` does not have."""
    with global_generators_kept():
        # They would else go on where the epoch before ended, which a resumed run has not gone through.
        seed_all(key(seed, Purpose.SAMPLER, epoch, 0), generators_in(sampler))
        for part in _samplers_in(sampler):
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


def _samplers_in(sampler: Any) -> Iterator[Any]:
    """The sampler, and those that it draws from: a BatchSampler keeps one as `sampler`."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)
