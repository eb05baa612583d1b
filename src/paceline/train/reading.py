"""Samples of a data set as batches on this worker's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray

from paceline.data import ArrayReader, ArraySet, stream_batches
from paceline.errors import DataError
from paceline.spec import Job


class DatasetReader:
    """Reads the batches of one run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._dtype = torch.float64 if job.precision == "float64" else torch.float32
        self._readers: WeakKeyDictionary[ArraySet, ArrayReader] = WeakKeyDictionary()

    def read(self, dataset: Any, epoch: int, indices: Iterable[NDArray[Any]], *, train: bool) -> Iterator[Any]:
        """For each array of `indices` the batch of the samples with these numbers; augmented if `train` is set."""
        job = self._job
        if isinstance(dataset, ArraySet):
            reader = self._readers.get(dataset)
            if reader is None:  # it may hold the whole set on the device, so there is one for each set
                reader = ArrayReader(dataset, self._device, self._dtype, job.channels_last, job.seed)
                self._readers[dataset] = reader
            return (reader.read(epoch, samples, train) for samples in indices)
        return stream_batches(
            dataset,
            (samples.tolist() for samples in indices),
            seed=job.seed,
            epoch=epoch,
            num_workers=job.data.loader_workers,
            device=self._device,
            dtype=self._dtype,
        )


def num_samples(dataset: Any, purpose: str) -> int:
    """The length of a data set. Raises `DataError` if it is empty, or not map-style."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"The {purpose} set, of type {type(dataset).__name__}, lacks a length or samples by number; give the "
            "map-style data set itself, not a loader over it."
        )
    if len(dataset) == 0:
        raise DataError(f"The {purpose} set is empty.")
    return len(dataset)
