"""Global batches: of a map-style data set in the order that the job or a sampler says, of a stream as it comes; and the
samples of this worker's shards of them, on its device.

Workers that read a stream of unknown length tell each other how many samples each has read, one step ahead: while a
batch is trained on, the next one is read and its sizes travel. So no worker waits for them, all divide a short batch by
the same number of samples, and all know together when the epoch has ended.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.batch import Batch
from paceline.containers import tensors, to_device
from paceline.data import ArrayReader, ArraySet, Loading, SampleRequest, is_loader, read_samples, set_size
from paceline.data.loading import collated, is_stream
from paceline.data.order import digest_of
from paceline.data.streams import StreamPosition, StreamStep, check_stream, is_split, read_stream, stand_in
from paceline.errors import DataError
from paceline.object_collectives import all_gather_objects
from paceline.process_groups import device_of, open_host_group
from paceline.spec import Job
from paceline.train.data_progress import DataProgress, GlobalBatch
from paceline.train.optim import counts_epochs
from paceline.train.process_group import World
from paceline.words import name_ranks

T = TypeVar("T")


@dataclass
class GlobalBatches:
    """The global batches of one run with this worker's content of each."""

    job: Job
    progress: DataProgress
    reader: DatasetReader
    world: World
    timeout_s: float
    sizes_group: dist.ProcessGroup | None = None
    """For the sizes of a stream's batches, in CPU memory: they travel while others communicate. It is opened for the
    first stream."""

    def of_epoch(
        self, loading: Loading, epoch: int, samples_per_epoch: int | None, *, reads_assignment: bool
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        """The global batches that remain of an epoch, each with this worker's content. A collective.

        Args:
            samples_per_epoch: by which schedules count the epochs of a stream; None: its own length, if it has one.
            reads_assignment: whether a worker computes the samples assigned to it; else its content is one sample,
                always the same.

        Raises:
            DataError: what the data set, the loader or the sampler says cannot be done, or workers would read other
                samples.
        """
        if not reads_assignment and (loading.sampler is not None or is_stream(loading.dataset)):
            raise DataError(
                "With aggregation.method = 'parameter_server_async' samples come in the job's own order; give a "
                "map-style data set without a sampler, or aggregate in another way."
            )
        if is_stream(loading.dataset):
            return self._of_stream(loading, epoch, samples_per_epoch)
        return self._of_set(loading, epoch, reads_assignment=reads_assignment)

    def _of_set(self, loading: Loading, epoch: int, *, reads_assignment: bool) -> Iterator[tuple[GlobalBatch, Batch]]:
        job, progress = self.job, self.progress
        num_samples = set_size(loading.dataset, "The training set", ", or a torch DataLoader over one")
        orders = functools.partial(loading.order, num_samples, job.global_batch_size, job.seed)
        numbers = progress.enter(epoch, orders, num_samples)
        # Loader processes are asked ahead.
        batches, asked = itertools.tee(progress.batch(number, numbers.stop) for number in numbers)
        if not reads_assignment:
            asked = itertools.islice(asked, 1)
        requests = (
            SampleRequest(one.own_shards if reads_assignment else (one.samples[:1],), one.number, one.assignment.own[0])
            for one in asked
        )
        compared = []
        if self.world.group is not None and numbers:
            first = progress.batch(numbers.start, numbers.stop)
            compared = [SampleRequest((first.samples[: job.shard_size],), first.number)]
        # Loader processes read them too: a file that a data set opens in this process could not be shared with those.
        contents = self.reader.read_shards(loading, epoch, itertools.chain(compared, requests))
        check_read_alike(progress.digest, next(contents).shards if compared else (), epoch, self.world.group)
        return zip(batches, contents if reads_assignment else itertools.cycle(contents), strict=False)

    def _of_stream(
        self, loading: Loading, epoch: int, samples_per_epoch: int | None
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        progress, stream, job = self.progress, loading.dataset, self.job
        check_stream(stream)
        if samples_per_epoch is None and hasattr(stream, "__len__"):
            samples_per_epoch = len(stream)
        if samples_per_epoch is None and counts_epochs(job):
            raise DataError(
                "The schedule or warm-up of optim counts epochs, but the length of the training stream is not known; "
                "give run.batches samples_per_epoch=…, or leave the schedule out and end the run by max_steps."
            )
        if self.world.group is not None and self.sizes_group is None:
            self.sizes_group = open_host_group(self.timeout_s)
        progress.gather = lambda value: all_gather_objects(value, self.sizes_group)
        name = stream.digest() if hasattr(stream, "digest") else type(stream).__name__
        ways = f"{getattr(stream, 'num_shards', 1)} shards" if is_split(stream, job.virtual_shards) else "as it comes"
        digest = digest_of(
            f"stream {name}, {ways}, {job.virtual_shards} substreams, {job.global_batch_size} samples a batch"
        )
        position = progress.enter_stream(epoch, digest)
        steps = self.reader.read_stream(loading, epoch, progress.own_substreams, position)
        first = next(steps)
        check_read_alike(f"{digest} {first.fingerprint}", (), epoch, self.sizes_group)
        return self._stream_batches(loading, first, steps, samples_per_epoch or 1)

    def _stream_batches(
        self, loading: Loading, first: StreamStep, steps: Iterator[StreamStep], samples_per_epoch: int
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        progress, job = self.progress, self.job
        ahead, received = first, exchange_sizes(first.sizes, job.virtual_shards, self.sizes_group)
        instead = functools.cache(lambda: self.reader.on_device(stand_in(loading)))
        while progress.steps_left != 0:
            step, sizes = ahead, received()
            if step is first and not any(sizes) and progress.at_epoch_start:
                raise DataError(
                    f"The training stream gives no sample in epoch {progress.epoch}; what can be read only once, such "
                    "as a generator, has to be made anew in its __iter__."
                )
            if not any(sizes) or (loading.drop_last and sum(sizes) < job.global_batch_size):
                progress.end_stream()
                return
            if progress.steps_left != 1:
                ahead = next(steps)
                received = exchange_sizes(ahead.sizes, job.virtual_shards, self.sizes_group)
            batch = progress.stream_batch(sizes, step.states, step.fingerprint, samples_per_epoch)
            own_sizes, contents = batch.assignment.sizes, step.contents
            if not own_sizes:  # this worker's substreams have ended before others'
                own_sizes, contents = (1,), [instead()]
            yield batch, Batch(tuple(contents), own_sizes)


def exchange_sizes(
    own: dict[int, int], num_substreams: int, group: dist.ProcessGroup | None
) -> Callable[[], list[int]]:
    """Tell all workers how many samples each own substream gives in one step; returns a function that waits for the
    sizes of all."""
    sizes = torch.zeros(num_substreams, dtype=torch.int64, device=None if group is None else device_of(group))
    for number, size in own.items():
        sizes[number] = size
    # The maximum: each worker writes its own substreams; workers of one pipeline or tensor group read the same.
    work = None if group is None else dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group, async_op=True)

    def received() -> list[int]:
        if work is not None:
            work.wait()
        found: list[int] = sizes.tolist()
        return found

    return received


def check_read_alike(order: str | None, content: Any, epoch: int | None, group: dist.ProcessGroup | None) -> None:
    """Check that all workers read the same samples; a collective at the beginning of every epoch and evaluation.

    Sums of samples are compared up to rounding, since nodes may have other processors. Texts are not: they may be
    paths.

    Args:
        order: the fingerprint of the order of samples on this worker.
        content: samples of the same numbers on every worker.
        epoch: None: of an evaluation.

    Raises:
        DataError: on all workers, if their orders or samples differ.
    """
    everyone = all_gather_objects([order, [one for tensor in tensors(content) for one in _sums(tensor)]], group)
    where = "the evaluation" if epoch is None else f"epoch {epoch}"
    (first_order, first), *_ = everyone
    if others := [rank for rank, (other, _) in enumerate(everyone) if other != first_order]:
        raise DataError(
            f"In {where} {name_ranks(others)} would read other samples than rank 0, or in another order; build the "
            "data set and the sampler alike on all workers, and draw from torch's, NumPy's or random's global "
            "generator only."
        )
    sums = torch.tensor(first, dtype=torch.float64)
    if others := [
        rank
        for rank, (_, other) in enumerate(everyone)
        if len(other) != len(first) or not torch.allclose(sums.new_tensor(other), sums, rtol=1e-5, atol=0.0)
    ]:
        raise DataError(
            f"In {where} {name_ranks(others)} read other values than rank 0 in samples of the same numbers; build and "
            "split the data set after paceline.init, which seeds the global generators alike on all workers, or with a "
            "seed of its own, and leave it as it is: what the script writes into it, it writes on one worker."
        )


def _sums(tensor: Tensor) -> Iterator[float]:
    """The sum of the positive and of the negative numbers in a tensor, neither of which cancels, and of squares."""
    whole = torch.cat([one.flatten() for one in tensor.unbind()]) if tensor.is_nested else tensor.to_dense()
    numbers = (torch.view_as_real(whole) if whole.is_complex() else whole).detach().double().nan_to_num()
    yield from (float(numbers.clamp(min=0).sum()), float(numbers.clamp(max=0).sum()), float(numbers.square().sum()))


# --- the samples of a data set on this worker's device ---


class DatasetReader:
    """Reads the batches of one run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._dtype = torch.float64 if job.precision == "float64" else torch.float32
        self._placed: dict[str, Any] = {"device": device, "dtype": self._dtype, "seed": job.seed}
        self._readers: WeakKeyDictionary[ArraySet, ArrayReader] = WeakKeyDictionary()

    def read(self, dataset: Any, epoch: int, indices: Iterable[NDArray[Any]], *, train: bool) -> Iterator[Any]:
        """For each array of `indices`, 1-D, the batch of the samples with these numbers; augmented if `train`."""
        loading = Loading(dataset, num_workers=self._job.data.loader_workers)
        requests = (SampleRequest((samples,)) for samples in indices)
        return (contents[0] for contents in self.contents(loading, epoch, requests, train=train))

    def read_shards(self, loading: Loading, epoch: int, requests: Iterable[SampleRequest]) -> Iterator[Batch]:
        """Batches to train on, one for each request."""
        requests, asked = itertools.tee(requests)
        for request, contents in zip(requests, self.contents(loading, epoch, asked, train=True), strict=False):
            yield Batch(tuple(contents), tuple(len(samples) for samples in request.shards))

    def read_stream(
        self, loading: Loading, epoch: int, own: Sequence[int], position: StreamPosition, batch_size: int | None = None
    ) -> Iterator[StreamStep]:
        """This worker's substreams, step by step from `position` on; steps after the end are empty.

        Args:
            own: the numbers of the substreams.
            batch_size: how many samples all workers read in a step; None: a global batch.
        """
        size = batch_size or self._job.global_batch_size
        return ahead(read_stream(loading, own, size, position, epoch=epoch, **self._placed), self._device)

    def on_device(self, content: Any) -> Any:
        """`content` with its tensors on this worker's device."""
        return to_device(content, self._device, self._dtype)

    def contents(
        self, loading: Loading, epoch: int, requests: Iterable[SampleRequest], *, train: bool
    ) -> Iterator[list[Any]]:
        """For each request the contents of its shards, each collated by itself."""
        job, dataset = self._job, loading.dataset
        if isinstance(dataset, ArraySet) and loading.collate_fn is collated:
            reader = self._readers.get(dataset)
            if reader is None:  # it may hold the whole set on the device, so there is one for each set
                reader = ArrayReader(dataset, self._device, self._dtype, job.channels_last, job.seed)
                self._readers[dataset] = reader
            read = ([reader.read(epoch, shard, train) for shard in request.shards] for request in requests)
            return ahead(read, self._device)
        return ahead(read_samples(loading, requests, epoch=epoch, train=train, **self._placed), self._device)


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
