"""Virtual shards: fixed pieces of every global batch, and which worker computes which.

The pieces depend on the batch alone. A worker takes neighbouring pieces, so more workers means fewer pieces each,
never other pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import JobError


def shard_sizes(num_samples: int, num_shards: int) -> tuple[int, ...]:
    """Samples in each non-empty shard: as even as can be, the larger ones first."""
    small, extra = divmod(num_samples, num_shards)
    return tuple(small + (shard < extra) for shard in range(min(num_shards, num_samples)))


def shard_run(rank: int, world_size: int, num_shards: int) -> tuple[int, int]:
    """The shards start … stop - 1 that belong to `rank`; run lengths differ by at most one."""
    return rank * num_shards // world_size, (rank + 1) * num_shards // world_size


def check_shards(world_size: int, num_shards: int) -> None:
    """Raises `JobError` where workers would go without work for good."""
    if world_size > num_shards:
        raise JobError(
            f"{world_size} workers cannot share virtual_shards = {num_shards}; use at most {num_shards} workers, or "
            f"set virtual_shards = {world_size} or more (it is part of the job: the same for every worker count)."
        )


@dataclass(frozen=True)
class ShardRange:
    """Some neighbouring shards of one worker that go through the model together.

    `start` and `stop` are positions in the worker's batch, `weight` the piece's part of the global batch.
    """

    first_shard: int
    sizes: tuple[int, ...]
    start: int
    stop: int
    weight: float


@dataclass(frozen=True)
class Assignment:
    """What one worker computes of one global batch."""

    all_sizes: tuple[int, ...]
    """Samples in every non-empty shard of the global batch."""
    runs: tuple[tuple[int, int], ...]
    """Non-empty shards (start, stop) of every rank."""
    rank: int

    @classmethod
    def of(cls, num_samples: int, num_shards: int, rank: int, world_size: int) -> Assignment:
        sizes = shard_sizes(num_samples, num_shards)
        runs = tuple(
            (min(start, len(sizes)), min(stop, len(sizes)))
            for start, stop in (shard_run(r, world_size, num_shards) for r in range(world_size))
        )
        return cls(sizes, runs, rank)

    @property
    def global_size(self) -> int:
        return sum(self.all_sizes)

    @property
    def first_shard(self) -> int:
        return self.runs[self.rank][0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples in each of this worker's shards; empty for a worker that idles this step."""
        start, stop = self.runs[self.rank]
        return self.all_sizes[start:stop]

    @property
    def span(self) -> tuple[int, int]:
        """Positions start … stop - 1 of this worker's samples in the global batch."""
        start = sum(self.all_sizes[: self.first_shard])
        return start, start + sum(self.sizes)

    def piece(self, first_shard: int, max_samples: int | None) -> ShardRange:
        """The piece that begins with `first_shard`: a whole shard, and those after it up to `max_samples` in all."""
        own_start, own_stop = self.runs[self.rank]
        last_shard = first_shard + 1
        while last_shard < own_stop and (
            max_samples is None or sum(self.all_sizes[first_shard : last_shard + 1]) <= max_samples
        ):
            last_shard += 1
        start = sum(self.all_sizes[own_start:first_shard])
        sizes = self.all_sizes[first_shard:last_shard]
        return ShardRange(first_shard, sizes, start, start + sum(sizes), sum(sizes) / self.global_size)
