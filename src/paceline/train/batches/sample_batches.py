"""Global batches: of a map-style data set in the order that the job or a sampler says, of a stream as it comes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.data import Loading, SampleRequest
from paceline.data.substreams import is_stream
from paceline.errors import DataError
from paceline.spec import Job
from paceline.train.batches.agreement import check_same_order, check_same_samples
from paceline.train.batches.data_progress import Batch, DataProgress
from paceline.train.batches.reading import DatasetReader, num_samples
from paceline.train.batches.stream_batches import StreamBatches
from paceline.train.process.process_group import World


@dataclass(frozen=True)
class GlobalBatches:
    """The global batches of one run with this worker's content of each: of data sets and of streams."""

    job: Job
    progress: DataProgress
    reader: DatasetReader
    world: World
    streams: StreamBatches

    def of_epoch(
        self, loading: Loading, epoch: int, samples_per_epoch: int | None, *, reads_assignment: bool
    ) -> Iterator[tuple[Batch, Any]]:
        """The global batches that remain of an epoch, each with this worker's content. A collective.

        Args:
            samples_per_epoch: by which schedules count the epochs of a stream; None: its own length, if it has one.
            reads_assignment: whether a worker computes the samples assigned to it; else its content is one sample,
                always the same.

        Raises:
            DataError: what the data set, the loader or the sampler says cannot be done.
        """
        job, progress = self.job, self.progress
        if not reads_assignment and (loading.sampler is not None or is_stream(loading.dataset)):
            raise DataError(
                "With aggregation.method = 'parameter_server_async' samples come in the job's own order; give a "
                "map-style data set without a sampler, or aggregate in another way."
            )
        if is_stream(loading.dataset):
            return self.streams.batches(loading, epoch, samples_per_epoch)
        set_size = num_samples(loading.dataset, "training")
        orders = functools.partial(loading.order, set_size, job.global_batch_size, job.seed)
        numbers = progress.enter(epoch, orders, set_size)
        check_same_order(progress.digest, epoch, self.world.group)
        read = (progress.batch(number, numbers.stop) for number in (numbers if reads_assignment else numbers[:1]))
        requests = (
            SampleRequest(
                batch.own_shards if reads_assignment else (batch.samples[:1],), batch.number, batch.assignment.own[0]
            )
            for batch in read
        )
        compared = []
        if self.world.group is not None and numbers:
            first = progress.batch(numbers.start, numbers.stop)
            compared = [SampleRequest((first.samples[: job.shard_size],), first.number)]
        # Loader processes read them too: a file that a data set opens in this process could not be shared with those.
        contents = self.reader.read_shards(loading, epoch, itertools.chain(compared, requests))
        if compared:
            check_same_samples(next(contents), epoch, self.world.group)
        batches = (progress.batch(number, numbers.stop) for number in numbers)
        return zip(batches, contents if reads_assignment else itertools.cycle(contents), strict=False)
