"""Virtual shards, the fixed subdivision of every global batch, and the assignment of shards to workers.

The shards depend on the batch alone. A worker takes neighbouring shards, so more workers means fewer shards each,
never other shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import env
from paceline.errors import JobError


def shard_sizes(num_samples: int, num_shards: int) -> tuple[int, ...]:
    """Number of samples in each non-empty shard: as even as possible, larger shards first."""
    small, extra = divmod(num_samples, num_shards)
    return tuple(small + (shard < extra) for shard in range(min(num_shards, num_samples)))


def shards_of_rank(rank: int, world_size: int, num_shards: int) -> tuple[int, int]:
    """The shards start … stop - 1 of `rank`; the number of shards per rank differs by at most one.

    Where `paceline verify` asks for it, the first worker has one more and the last one fewer.
    """
    shift = 1 if num_shards >= 2 * world_size and env.text(env.UNEVEN_DEAL) else 0
    bounds = [number * num_shards // world_size + shift * (0 < number < world_size) for number in (rank, rank + 1)]
    return bounds[0], bounds[1]


def check_shards(world_size: int, num_shards: int) -> None:
    """Raises `JobError` if some workers would never get a shard."""
    if world_size > num_shards:
        raise JobError(
            f"{world_size} workers cannot share virtual_shards = {num_shards}; use at most {num_shards} workers, or "
            f"set virtual_shards = {world_size} or more (it is part of the job: the same for every worker count)."
        )


@dataclass(frozen=True)
class Assignment:
    """The virtual shards that one worker computes of one global batch."""

    shard_sizes: tuple[int, ...]
    """Number of samples in every non-empty shard of the global batch."""
    shards_of_rank: tuple[tuple[int, int], ...]
    """The non-empty shards start … stop - 1 of every rank."""
    rank: int

    @classmethod
    def of(cls, num_samples: int, num_shards: int, rank: int, world_size: int) -> Assignment:
        """The assignment of a global batch of `num_samples`; one of fewer samples than shards has fewer shards."""
        return cls.of_sizes(shard_sizes(num_samples, num_shards), num_shards, rank, world_size)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], num_shards: int, rank: int, world_size: int) -> Assignment:
        """The assignment of shards of these sizes; empty ones are left out, and the others numbered without gaps."""
        num_before = list(itertools.accumulate((size > 0 for size in sizes), initial=0))
        num_before += [num_before[-1]] * (num_shards + 1 - len(num_before))
        of_ranks = (shards_of_rank(one, world_size, num_shards) for one in range(world_size))
        own = tuple((num_before[start], num_before[stop]) for start, stop in of_ranks)
        return cls(tuple(size for size in sizes if size > 0), own, rank)

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

    def weight(self, shard: int) -> float:
        """The part of the global batch that a shard is."""
        return self.shard_sizes[shard] / self.global_size
