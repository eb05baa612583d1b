"""The chunks of an evaluation set: what a worker measures at once. Every sample is in one chunk that counts.

Chunks are cut and numbered alike on any number of workers. Those of a stream come from its substreams, batch by batch,
as they would be trained on; nobody knows how many there are: in each step all workers tell each other how many samples
every substream gave, and the evaluation ends when none gave any.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.data import Loading, SampleRequest
from paceline.data.loading import is_stream
from paceline.data.streams import StreamPosition, check_stream, is_split, stand_in
from paceline.errors import DataError
from paceline.parallel.assignment import shards_of_rank
from paceline.spec import Job, Mesh
from paceline.train.batches.agreement import check_same_order, check_same_samples
from paceline.train.batches.global_batches import SizeExchange
from paceline.train.batches.reading import DatasetReader, num_samples
from paceline.train.process.process_group import World


@dataclass(frozen=True)
class Chunk:
    """Samples that are measured together."""

    number: int
    """Seeds what measuring it draws."""
    place: tuple[int, int]
    """Its substream (0 for a map-style set) and its index there: the order in which chunks are added up."""
    size: int
    content: Any
    counts: bool = True
    """Whether this worker gives its results: others compute it too where they hold other parts of the model, or where
    all workers have to compute equally many."""


@dataclass(frozen=True)
class EvaluationReader:
    """Reads the chunks of this worker. Every method is a collective."""

    reader: DatasetReader
    job: Job
    mesh: Mesh
    world: World
    in_step: bool
    """Whether all workers must compute equally many chunks, because each has collectives."""

    def chunks(self, loading: Loading) -> Iterator[Chunk]:
        """Raises `DataError` where the set cannot be evaluated, or workers would read other samples."""
        return self._of_stream(loading) if is_stream(loading.dataset) else self._of_set(loading)

    def _of_set(self, loading: Loading) -> Iterator[Chunk]:
        job, group = self.job, self.world.group
        order = loading.evaluation_order(num_samples(loading.dataset, "evaluation"), job.eval_batch_size, job.seed)
        check_same_order(order.digest(), None, group)
        rank, num_assignments = self.mesh.share(self.world.rank), self.mesh.num_assignments
        computed = own_chunks(order.num_batches, rank, num_assignments, in_step=self.in_step)
        left = set(own_chunks(order.num_batches, rank, num_assignments, in_step=False))
        if not self.mesh.leads_assignment(self.world.rank):
            left.clear()
        compared = [] if group is None else [SampleRequest((order.batch(0)[: job.shard_size],))]
        contents = self.reader.read_chunks(loading, order, computed, compared)
        if compared:
            check_same_samples(next(contents), None, group)
        for number, content in zip(computed, contents, strict=True):
            yield Chunk(number, (0, number), len(order.batch(number)), content, number in left)
            left.discard(number)

    def _of_stream(self, loading: Loading) -> Iterator[Chunk]:
        check_stream(loading.dataset)
        loading.check_whole()
        stream = copy.deepcopy(loading.dataset)  # it may be trained on at the same time
        loading = dataclasses.replace(loading, dataset=stream)
        num = self.job.virtual_shards
        shares = [
            range(*shards_of_rank(rank, self.mesh.num_assignments, num)) for rank in range(self.mesh.num_assignments)
        ]
        own, leads = shares[self.mesh.share(self.world.rank)], self.mesh.leads_assignment(self.world.rank)
        size = loading.batch_size or self.job.eval_batch_size
        batch_size = size * num if is_split(stream, num) else max(size, num)
        instead: Chunk | None = None
        index, fingerprint = 0, 0
        for step in self.reader.read_stream(loading, 0, list(own), StreamPosition(0, (0,) * num), batch_size):
            fingerprint = step.fingerprint
            sizes = SizeExchange(step.sizes, num, self.world.group).received()
            if not any(sizes):
                break
            mine = [substream for substream in own if sizes[substream]]
            for substream, content in zip(mine, step.contents, strict=True):
                chunk = Chunk(index * num + substream, (substream, index), sizes[substream], content, leads)
                instead = dataclasses.replace(chunk, counts=False)
                yield chunk
            most = max(sum(sizes[substream] > 0 for substream in share) for share in shares)
            for _ in range(most - len(mine) if self.in_step else 0):
                instead = instead or Chunk(-1, (0, 0), 1, self.reader.on_device(stand_in(loading)), counts=False)
                yield instead
            index += 1
        check_same_order(str(fingerprint), None, self.world.group)
        if not index:
            raise DataError("The evaluation stream is empty.")


def own_chunks(num_chunks: int, rank: int, num_assignments: int, *, in_step: bool) -> list[int]:
    """Numbers of the chunks that worker `rank` of `num_assignments` evaluates; rank 0 has one if any rank has.

    Args:
        in_step: whether all ranks must compute equally many because each chunk has collectives: a rank with fewer
            repeats chunks of the next rank.
    """
    first, last = (-(-one * num_chunks // num_assignments) for one in (rank, rank + 1))
    most = -(-num_chunks // num_assignments)
    return [number % num_chunks for number in range(first, first + most if in_step else last)]
