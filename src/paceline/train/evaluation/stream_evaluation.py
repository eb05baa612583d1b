"""The chunks of a stream that is evaluated: its substreams, batch by batch, as they would be trained on.

Nobody knows how many samples there are. All workers take the same steps: in each they tell each other how many samples
every substream gave, and the evaluation ends when none gave any.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from paceline.data import Loading
from paceline.data.sample_reader import collated
from paceline.data.stream_reader import stand_in
from paceline.data.substreams import StreamPosition, check_stream, is_split
from paceline.errors import DataError
from paceline.parallel.assignment import shards_of_rank
from paceline.spec import Job, Mesh
from paceline.train.batches.agreement import check_same_order
from paceline.train.batches.reading import DatasetReader
from paceline.train.batches.stream_batches import SizeExchange
from paceline.train.evaluation.metric_states import Merge, MergeTree
from paceline.train.process.process_group import World

_STAND_IN = -1


class StreamChunks:
    """Chunks are numbered as they are read; they count substream by substream, whoever reads these."""

    def __init__(
        self, loading: Loading, reader: DatasetReader, job: Job, mesh: Mesh, world: World, *, in_step: bool
    ) -> None:
        """
        Args:
            in_step: whether all workers must compute equally many chunks, because each has collectives.
        """
        check_stream(loading.dataset)
        loading.check_whole()
        collate_fn = loading.collate_fn or collated
        stream = copy.deepcopy(loading.dataset)  # it may be trained on at the same time
        self._loading = dataclasses.replace(loading, dataset=stream, collate_fn=collate_fn)
        self._reader = reader
        self._world = world
        self._in_step = in_step
        self._num = job.virtual_shards
        num_shares = mesh.num_assignments
        self._shares = [range(*shards_of_rank(rank, num_shares, self._num)) for rank in range(num_shares)]
        self._own = self._shares[mesh.share(world.rank)]
        self._leads = mesh.leads_assignment(world.rank)
        size = loading.batch_size or job.eval_batch_size
        self._batch_size = size * self._num if is_split(stream, self._num) else max(size, self._num)
        self._steps: list[list[int]] = []
        """The number of samples of each substream in each step."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """This worker's chunks with their numbers; and stand-ins, where others have more."""
        start = StreamPosition(0, (0,) * self._num)
        last: tuple[int, Any] | None = None
        fingerprint = 0
        for step in self._reader.read_stream(self._loading, 0, list(self._own), start, self._batch_size):
            fingerprint = step.fingerprint
            sizes = SizeExchange(step.sizes, self._num, self._world.group).received()
            if not any(sizes):
                break
            self._steps.append(sizes)
            mine = [number for number in self._own if sizes[number]]
            chunks = zip(((len(self._steps) - 1) * self._num + number for number in mine), step.contents, strict=True)
            for last in chunks:
                yield last
            most = max(sum(sizes[number] > 0 for number in share) for share in self._shares)
            for _ in range(most - len(mine) if self._in_step else 0):
                last = last or (_STAND_IN, self._reader.on_device(stand_in(self._loading)))
                yield last
        check_same_order(str(fingerprint), None, self._world.group)
        if not self._steps:
            raise DataError("The evaluation stream is empty.")

    def size(self, number: int) -> int:
        """The number of samples in a chunk."""
        return 1 if number == _STAND_IN else self._steps[number // self._num][number % self._num]

    @property
    def num_samples(self) -> int:
        return sum(map(sum, self._steps))

    @property
    def numbers(self) -> list[int]:
        """The chunks of all workers in the order in which they count."""
        return [
            step * self._num + number
            for number in range(self._num)
            for step, sizes in enumerate(self._steps)
            if sizes[number]
        ]

    def counts_here(self, number: int) -> bool:
        """Whether this worker is the one that gives a chunk's results; it has computed it."""
        return self._leads and number != _STAND_IN and number % self._num in self._own

    def tree(self, merge: Merge) -> MergeTree:
        """Merges the states of this worker's chunks."""
        return _SubstreamsTree(merge, self._num)


class _SubstreamsTree(MergeTree):
    """A tree for each substream, whose chunks come in turn."""

    def __init__(self, merge: Merge, num_substreams: int) -> None:
        super().__init__(merge)
        self._num = num_substreams
        self._trees: dict[int, MergeTree] = {}

    def push(self, start: int, size: int, state: Any) -> None:
        step, number = divmod(start, self._num)
        self._trees.setdefault(number, MergeTree(self._merge)).push(step, size, state)

    def parts(self) -> list[tuple[int, int, Any]]:
        return [(number, 1, self._trees[number].root()) for number in sorted(self._trees)]
