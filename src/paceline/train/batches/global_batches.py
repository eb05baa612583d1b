"""Global batches: of a map-style data set in the order that the job or a sampler says, of a stream as it comes.

Workers that read a stream of unknown length tell each other how many samples each has read, one step ahead: while a
batch is trained on, the next one is read and its sizes travel. So no worker waits for them, all divide a short batch by
the same number of samples, and all know together when the epoch has ended.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.batch import Batch
from paceline.data import Loading, SampleRequest
from paceline.data.loading import is_stream
from paceline.data.order import digest_of
from paceline.data.streams import StreamStep, check_stream, is_split, stand_in
from paceline.errors import DataError
from paceline.object_collectives import all_gather_objects
from paceline.process_groups import device_of, open_host_group
from paceline.spec import Job
from paceline.train.batches.agreement import check_same_order, check_same_samples
from paceline.train.batches.data_progress import DataProgress, GlobalBatch
from paceline.train.batches.reading import DatasetReader, num_samples
from paceline.train.optimizers.schedule import counts_epochs
from paceline.train.process.process_group import World


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
        job, progress, group = self.job, self.progress, self.world.group
        set_size = num_samples(loading.dataset, "training")
        orders = functools.partial(loading.order, set_size, job.global_batch_size, job.seed)
        numbers = progress.enter(epoch, orders, set_size)
        check_same_order(progress.digest, epoch, group)
        read = (progress.batch(number, numbers.stop) for number in (numbers if reads_assignment else numbers[:1]))
        requests = (
            SampleRequest(
                batch.own_shards if reads_assignment else (batch.samples[:1],), batch.number, batch.assignment.own[0]
            )
            for batch in read
        )
        compared = []
        if group is not None and numbers:
            first = progress.batch(numbers.start, numbers.stop)
            compared = [SampleRequest((first.samples[: job.shard_size],), first.number)]
        # Loader processes read them too: a file that a data set opens in this process could not be shared with those.
        contents = self.reader.read_shards(loading, epoch, itertools.chain(compared, requests))
        if compared:
            check_same_samples(next(contents), epoch, group)
        batches = (progress.batch(number, numbers.stop) for number in numbers)
        return zip(batches, contents if reads_assignment else itertools.cycle(contents), strict=False)

    def _of_stream(
        self, loading: Loading, epoch: int, samples_per_epoch: int | None
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        progress, stream = self.progress, loading.dataset
        check_stream(stream)
        if samples_per_epoch is None and hasattr(stream, "__len__"):
            samples_per_epoch = len(stream)
        if samples_per_epoch is None and counts_epochs(self.job):
            raise DataError(
                "The schedule or warm-up of optim counts epochs, but the length of the training stream is not known; "
                "give run.batches samples_per_epoch=…, or leave the schedule out and end the run by max_steps."
            )
        if self.world.group is not None and self.sizes_group is None:
            self.sizes_group = open_host_group(self.timeout_s)
        progress.gather = lambda value: all_gather_objects(value, self.sizes_group)
        name = stream.digest() if hasattr(stream, "digest") else type(stream).__name__
        is_shared_out = is_split(stream, self.job.virtual_shards)
        ways = f"{getattr(stream, 'num_shards', 1)} shards" if is_shared_out else "as it comes"
        digest = digest_of(
            f"stream {name}, {ways}, {self.job.virtual_shards} substreams, {self.job.global_batch_size} samples a batch"
        )
        position = progress.enter_stream(epoch, digest)
        steps = self.reader.read_stream(loading, epoch, progress.own_substreams, position)
        first = next(steps)
        check_same_order(f"{digest} {first.fingerprint}", epoch, self.sizes_group)
        return self._stream_batches(loading, first, steps, samples_per_epoch or 1)

    def _stream_batches(
        self, loading: Loading, first: StreamStep, steps: Iterator[StreamStep], samples_per_epoch: int
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        progress, job = self.progress, self.job
        ahead, exchange = first, SizeExchange(first.sizes, job.virtual_shards, self.sizes_group)
        instead = functools.cache(lambda: self.reader.on_device(stand_in(loading)))
        while progress.steps_left != 0:
            step, sizes = ahead, exchange.received()
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
                exchange = SizeExchange(ahead.sizes, job.virtual_shards, self.sizes_group)
            batch = progress.stream_batch(sizes, step.states, step.fingerprint, samples_per_epoch)
            own_sizes, contents = batch.assignment.sizes, step.contents
            if not own_sizes:  # this worker's substreams have ended before others'
                own_sizes, contents = (1,), [instead()]
            yield batch, Batch(tuple(contents), own_sizes)


class SizeExchange:
    """The number of samples that each substream gives in one step, on its way to all workers."""

    def __init__(self, own: dict[int, int], num_substreams: int, group: dist.ProcessGroup | None) -> None:
        self._sizes = torch.zeros(num_substreams, dtype=torch.int64, device=None if group is None else device_of(group))
        for number, size in own.items():
            self._sizes[number] = size
        # The maximum: each worker writes its own substreams; workers of one pipeline or tensor group read the same.
        self._work = (
            None if group is None else dist.all_reduce(self._sizes, dist.ReduceOp.MAX, group=group, async_op=True)
        )

    def received(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
        sizes: list[int] = self._sizes.tolist()
        return sizes
