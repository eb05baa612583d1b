"""Samples of a data set as batches on this worker's device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray

from paceline.batch import Batch
from paceline.containers import tensors, to_device
from paceline.data import ArrayReader, ArraySet, Loading, SampleRequest, is_loader, read_samples, set_size
from paceline.data.loading import collated
from paceline.data.order import EpochOrder
from paceline.data.streams import StreamPosition, StreamStep, read_stream
from paceline.spec import Job

T = TypeVar("T")


class DatasetReader:
    """Reads the batches of one run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._dtype = torch.float64 if job.precision == "float64" else torch.float32
        self._readers: WeakKeyDictionary[ArraySet, ArrayReader] = WeakKeyDictionary()

    def read(self, dataset: Any, epoch: int, indices: Iterable[NDArray[Any]], *, train: bool) -> Iterator[Any]:
        """For each array of `indices`, 1-D, the batch of the samples with these numbers; augmented if `train`."""
        loading = Loading(dataset, num_workers=self._job.data.loader_workers)
        requests = (SampleRequest((samples,)) for samples in indices)
        return (contents[0] for contents in self._contents(loading, epoch, requests, train))

    def read_chunks(
        self, loading: Loading, chunks: EpochOrder, numbers: Iterable[int], before: Iterable[SampleRequest] = ()
    ) -> Iterator[Any]:
        """The chunks of an evaluation with these numbers, each collated as a whole; after what is read before them."""
        of_chunks = (SampleRequest((chunks.batch(number),), number) for number in numbers)
        requests = itertools.chain(before, of_chunks)
        return (contents[0] for contents in self._contents(loading, 0, requests, train=False))

    def read_shards(self, loading: Loading, epoch: int, requests: Iterable[SampleRequest]) -> Iterator[Any]:
        """Batches to train on, one for each request."""
        requests, asked = itertools.tee(requests)  # loader processes are asked ahead
        for request, contents in zip(requests, self._contents(loading, epoch, asked, train=True), strict=False):
            yield Batch(tuple(contents), tuple(len(samples) for samples in request.shards))

    def read_stream(
        self,
        loading: Loading,
        epoch: int,
        own: Sequence[int],
        position: StreamPosition,
        batch_size: int | None = None,
    ) -> Iterator[StreamStep]:
        """This worker's substreams, step by step from `position` on; steps after the end are empty.

        Args:
            batch_size: how many samples all workers read in a step; None: a global batch.
        """
        job = self._job
        steps = read_stream(
            loading,
            own,
            batch_size or job.global_batch_size,
            position,
            seed=job.seed,
            epoch=epoch,
            device=self._device,
            dtype=self._dtype,
        )
        return ahead(steps, self._device)

    def on_device(self, content: Any) -> Any:
        return to_device(content, self._device, self._dtype)

    def _contents(
        self, loading: Loading, epoch: int, requests: Iterable[SampleRequest], train: bool
    ) -> Iterator[list[Any]]:
        job, dataset = self._job, loading.dataset
        if isinstance(dataset, ArraySet) and loading.collate_fn is collated:
            reader = self._readers.get(dataset)
            if reader is None:  # it may hold the whole set on the device, so there is one for each set
                reader = ArrayReader(dataset, self._device, self._dtype, job.channels_last, job.seed)
                self._readers[dataset] = reader
            read = ([reader.read(epoch, shard, train) for shard in request.shards] for request in requests)
            return ahead(read, self._device)
        samples = read_samples(
            loading, requests, seed=job.seed, epoch=epoch, device=self._device, dtype=self._dtype, train=train
        )
        return ahead(samples, self._device)


def num_samples(dataset: Any, purpose: str) -> int:
    """The length of a data set. Raises `DataError` if it is empty, or not map-style."""
    return set_size(dataset, f"The {purpose} set", ", or a torch DataLoader over one")


def loading_of(job: Job, dataset: Any, purpose: str, **given: Any) -> Loading:
    """How `dataset` is read, by what is given here, by the DataLoader that it is, or by the job."""
    if given["num_workers"] is None and not is_loader(dataset):
        given["num_workers"] = job.data.loader_workers
    return Loading.of(dataset, job.global_batch_size, purpose, **given)


def ahead(contents: Iterable[T], device: torch.device) -> Iterator[T]:
    """The same contents, each read while the one before is trained on; on a CPU as they are.

    What reading enqueues on the GPU (copies from pinned memory, augmentation) runs on a stream of its own. An error is
    raised in the place of the content that it belongs to.
    """
    if device.type != "cuda":
        yield from contents
        return
    reading = iter(contents)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # a data set that lies on the GPU may still be on its way

    def read() -> list[T] | Exception:
        """The next content; an empty list at the end."""
        try:
            with torch.cuda.stream(side):
                return [next(reading)]
        except StopIteration:
            return []
        except Exception as error:
            return error

    found = read()
    while found:
        if isinstance(found, Exception):
            raise found
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(side)  # for this content, not for the next one
        content = found[0]
        for tensor in tensors(content):
            if tensor.is_cuda:
                tensor.record_stream(computing)  # its memory is not the side stream's again before it is used
        found = read()
        yield content
