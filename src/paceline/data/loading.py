"""`Loading`: a data set, and how its samples become batches; also as a DataLoader says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from paceline.data.order import EpochOrder, ListedOrder, ShuffledOrder, check_sampler, listed_order
from paceline.errors import DataError

Collate = Callable[[list[Any]], Any]
"""Makes the content of a batch from a list of samples."""


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
        """How `dataset` is read; what a DataLoader says is taken over, unless it is given here.

        Raises:
            DataError: something that a DataLoader says cannot be so, or a sampler gives each worker other samples.
        """
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
        """What a DataLoader says. `shuffle=True` means the job's own order."""
        if loader.batch_size is None and loader.batch_sampler is None:
            raise DataError(
                f"The {purpose} DataLoader has batch_size=None, so its data set makes the batches, and these cannot be "
                "divided among workers; give a data set of single samples and a batch size."
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
        """The chunks in which the set is evaluated: all its samples, or those of the sampler.

        Raises:
            DataError: some samples would be left out.
        """
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
