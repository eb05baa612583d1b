"""Global batches of a stream of unknown length: workers tell each other how many samples each has read.

They do so one step ahead: while a batch is trained on, the next one is read and its sizes travel. So no worker waits
for them, all divide a short batch by the same number of samples, and all know together when the epoch has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.data import Loading
from paceline.data.order import digest_of
from paceline.data.stream_reader import StreamStep, stand_in
from paceline.data.substreams import check_stream, is_split
from paceline.errors import DataError
from paceline.object_collectives import all_gather_objects
from paceline.process_groups import device_of, open_host_group
from paceline.sharded_batch import ShardedBatch
from paceline.spec import Job
from paceline.train.batches.agreement import check_same_order
from paceline.train.batches.data_progress import Batch, DataProgress
from paceline.train.batches.reading import DatasetReader
from paceline.train.optimizers.schedule import counts_epochs
from paceline.train.process.process_group import World


@dataclass
class StreamBatches:
    """Reads the streams of one run."""

    job: Job
    progress: DataProgress
    reader: DatasetReader
    world: World
    timeout_s: float
    group: dist.ProcessGroup | None = None
    """For sizes alone, in CPU memory: they travel while others communicate. It is opened for the first stream."""

    def batches(self, loading: Loading, epoch: int, samples_per_epoch: int | None) -> Iterator[tuple[Batch, Any]]:
        """The remaining global batches of an epoch with this worker's content of each. A collective. Raises `DataError`
        where workers cannot share the stream, or read other samples of it."""
        job, progress, stream = self.job, self.progress, loading.dataset
        check_stream(stream)
        samples_per_epoch = _epoch_length(job, stream, samples_per_epoch)
        if self.world.group is not None and self.group is None:
            self.group = open_host_group(self.timeout_s)
        progress.gather = lambda value: all_gather_objects(value, self.group)
        digest = _digest(stream, job)
        position = progress.enter_stream(epoch, digest)
        steps = self.reader.read_stream(loading, epoch, progress.own_substreams, position)
        first = next(steps)
        check_same_order(f"{digest} {first.fingerprint}", epoch, self.group)
        return self._train_on(loading, first, steps, samples_per_epoch)

    def _train_on(
        self, loading: Loading, first: StreamStep, steps: Iterator[StreamStep], samples_per_epoch: int
    ) -> Iterator[tuple[Batch, Any]]:
        progress, job = self.progress, self.job
        ahead, exchange = first, SizeExchange(first.sizes, job.virtual_shards, self.group)
        are_apart = loading.collate_fn is not None
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
                exchange = SizeExchange(ahead.sizes, job.virtual_shards, self.group)
            batch = progress.stream_batch(sizes, step.states, step.fingerprint, samples_per_epoch)
            own_sizes, contents = batch.assignment.sizes, step.contents
            if not own_sizes:  # this worker's substreams have ended before others'
                own_sizes, contents = (1,), [instead()]
            yield batch, ShardedBatch(tuple(contents), own_sizes) if are_apart else contents[0]


class SizeExchange:
    """The number of samples that each substream gives in one step, on its way to all workers."""

    def __init__(self, own: dict[int, int], num_substreams: int, group: dist.ProcessGroup | None) -> None:
        device = None if group is None else device_of(group)
        self._sizes = torch.zeros(num_substreams, dtype=torch.int64, device=device)
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


def _digest(stream: Any, job: Job) -> str:
    """A fingerprint of how a stream is divided."""
    name = stream.digest() if hasattr(stream, "digest") else type(stream).__name__
    ways = f"{getattr(stream, 'num_shards', 1)} shards" if is_split(stream, job.virtual_shards) else "as it comes"
    return digest_of(f"stream {name}, {ways}, {job.virtual_shards} substreams, {job.global_batch_size} samples a batch")


def _epoch_length(job: Job, stream: Any, given: int | None) -> int:
    """The number of samples by which schedules count an epoch; 1 where none does."""
    if given is None and hasattr(stream, "__len__"):
        given = len(stream)
    if given is not None:
        return given
    if counts_epochs(job):
        raise DataError(
            "The schedule or warm-up of optim counts epochs, but the length of the training stream is not known; give "
            "run.batches samples_per_epoch=…, or leave the schedule out and end the run by max_steps."
        )
    return 1
