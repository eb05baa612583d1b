"""Virtual shards, the fixed subdivision of every global batch, and the assignment of shards to workers.

The shards depend on the batch alone. A worker takes neighbouring shards, so more workers means fewer shards each,
never other shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import JobError


def shard_sizes(num_samples: int, num_shards: int) -> tuple[int, ...]:
    """Number of samples in each non-empty shard: as even as possible, larger shards first."""
    small, extra = divmod(num_samples, num_shards)
    return tuple(small + (shard < extra) for shard in range(min(num_shards, num_samples)))


def shards_of_rank(rank: int, world_size: int, num_shards: int) -> tuple[int, int]:
    """The shards start … stop - 1 of `rank`; the number of shards per rank differs by at most one."""
    return rank * num_shards // world_size, (rank + 1) * num_shards // world_size


def check_shards(world_size: int, num_shards: int) -> None:
    """Raises `JobError` if some workers would never get a shard."""
    if world_size > num_shards:
        raise JobError(
            f"{world_size} workers cannot share virtual_shards = {num_shards}; use at most {num_shards} workers, or "
            f"set virtual_shards = {world_size} or more (it is part of the job: the same for every worker count)."
        )


@dataclass(frozen=True)
class ShardRange:
    """Consecutive shards of one worker that go through the model in one pass."""

    first_shard: int
    sizes: tuple[int, ...]
    """Number of samples in each shard."""
    all_sizes: tuple[int, ...]
    """Number of samples in each shard of the whole global batch."""
    start: int = 0
    """Position of their first sample in the worker's batch."""
    are_interleaved: bool = False
    """Whether they, equal in size, take turns: the first sample of each, then the second of each."""

    @property
    def stop_shard(self) -> int:
        return self.first_shard + len(self.sizes)

    @property
    def stop(self) -> int:
        return self.start + sum(self.sizes)

    @property
    def weight(self) -> float:
        """Fraction of the global batch in these shards."""
        return sum(self.sizes) / sum(self.all_sizes)

    def norm_weights(self, values_per_sample: int) -> list[float]:
        """The part of the global batch that each shard is in the statistics of a batch norm layer.

        A shard with one value a channel has no variance: it says nothing, and its weight is 0.
        """
        total = sum(size for size in self.all_sizes if size * values_per_sample > 1)
        return [size / total if size * values_per_sample > 1 else 0.0 for size in self.sizes]


@dataclass(frozen=True)
class Assignment:
    """The virtual shards that one worker computes of one global batch."""

    shard_sizes: tuple[int, ...]
    """Number of samples in every non-empty shard of the global batch."""
    shards_of_rank: tuple[tuple[int, int], ...]
    """The non-empty shards start … stop - 1 of every rank."""
    rank: int
    one_by_one: bool = False
    """Whether no two shards may go through the model in one pass, as where each was padded for itself."""

    @classmethod
    def of(
        cls, num_samples: int, num_shards: int, rank: int, world_size: int, *, one_by_one: bool = False
    ) -> Assignment:
        """The assignment of a global batch of `num_samples`; one of fewer samples than shards has fewer shards."""
        return cls.of_sizes(shard_sizes(num_samples, num_shards), num_shards, rank, world_size, one_by_one=one_by_one)

    @classmethod
    def of_sizes(
        cls, sizes: Sequence[int], num_shards: int, rank: int, world_size: int, *, one_by_one: bool = False
    ) -> Assignment:
        """The assignment of shards of these sizes; empty ones are left out, and the others numbered without gaps."""
        num_before = list(itertools.accumulate((size > 0 for size in sizes), initial=0))
        num_before += [num_before[-1]] * (num_shards + 1 - len(num_before))
        of_ranks = (shards_of_rank(one, world_size, num_shards) for one in range(world_size))
        own = tuple((num_before[start], num_before[stop]) for start, stop in of_ranks)
        return cls(tuple(size for size in sizes if size > 0), own, rank, one_by_one)

    @property
    def global_size(self) -> int:
        return sum(self.shard_sizes)

    @property
    def own(self) -> tuple[int, int]:
        """This worker's shards, start … stop - 1."""
        return self.shards_of_rank[self.rank]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples in each of this worker's shards; empty for a worker without samples in this step."""
        return self.shard_sizes[slice(*self.own)]

    @property
    def span(self) -> tuple[int, int]:
        """Positions start … stop - 1 of this worker's samples in the global batch."""
        start = sum(self.shard_sizes[: self.own[0]])
        return start, start + sum(self.sizes)

    def shard_range(self, first_shard: int, max_samples: int | None) -> ShardRange:
        """The shard `first_shard` and this worker's shards after it, up to `max_samples` samples in total."""
        own_start, own_stop = self.own
        stop_shard = first_shard + 1
        if self.one_by_one:
            max_samples = 0
        while stop_shard < own_stop and (
            max_samples is None or sum(self.shard_sizes[first_shard : stop_shard + 1]) <= max_samples
        ):
            stop_shard += 1
        start = sum(self.shard_sizes[own_start:first_shard])
        return ShardRange(first_shard, self.shard_sizes[first_shard:stop_shard], self.shard_sizes, start)
