"""The groups of workers of `local_sgd` and `diloco`: a group trains as one, and outer steps synchronise the groups."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from paceline.comm.links import node_of_every_rank
from paceline.parallel.engine import StepInput
from paceline.process_groups import open_group
from paceline.spec import AggregationSpec


@dataclass(frozen=True)
class WorkerGroups:
    """The groups, seen by one worker. In sums over all groups, workers of a group divide the buckets among them."""

    everyone: dist.ProcessGroup | None
    """All workers; None: there is one."""
    members: tuple[tuple[int, ...], ...]
    """The ranks of the workers of each group."""
    own: tuple[int, ...]
    """The ranks of the workers of this worker's group."""
    inside: dist.ProcessGroup | None
    """This worker's group; None: it is the only one in it."""
    across: dist.ProcessGroup | None
    """The workers at this worker's place in every group; None: there is one group, or some group has no such place."""
    num_places: int
    """The number of workers of each group that take part in sums over groups."""

    @classmethod
    def open(cls, spec: AggregationSpec, everyone: dist.ProcessGroup | None, timeout_s: float) -> WorkerGroups:
        """A collective of all workers of the run."""
        if everyone is None:
            return cls(None, ((0,),), (0,), None, None, 1)
        rank, world_size = dist.get_rank(everyone), dist.get_world_size(everyone)
        members = _members(spec, everyone, world_size)
        own = next(group for group in members if rank in group)
        if len(own) == 1 and len(members) == world_size:
            return cls(everyone, members, own, None, everyone, 1)
        place = own.index(rank)
        num_places = min(map(len, members))
        is_across = place < num_places and len(members) > 1
        across = [group[place] for group in members] if is_across else [rank]
        return cls(everyone, members, own, open_group(own, timeout_s), open_group(across, timeout_s), num_places)

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of its group."""
        return self._place == 0

    def share(self, values: Tensor, bucket: int) -> None:
        """Give all workers of a group what the one has that added up the bucket of this number."""
        if self.inside is not None:
            dist.broadcast(values, group_src=bucket % self.num_places, group=self.inside)

    def adds_up(self, bucket: int) -> bool:
        """Whether this worker takes part in the sum of the bucket of this number."""
        return self.across is not None and self._place == bucket % self.num_places

    @property
    def _place(self) -> int:
        return 0 if self.everyone is None else self.own.index(dist.get_rank(self.everyone))


def among(step: StepInput, ranks: tuple[int, ...]) -> StepInput:
    """The step as if these ranks' samples were the whole batch; every shard keeps its own random numbers."""
    whole = step.assignment
    shards = [shard for rank in ranks for shard in range(*whole.shards_of_rank[rank])]
    ends = [0]
    for rank in ranks:
        start, stop = whole.shards_of_rank[rank]
        ends.append(ends[-1] + stop - start)
    return dataclasses.replace(
        step,
        assignment=dataclasses.replace(
            whole,
            shard_sizes=tuple(whole.shard_sizes[shard] for shard in shards),
            shards_of_rank=tuple(itertools.pairwise(ends)),
            rank=ranks.index(whole.rank),
        ),
        shard_seed=lambda shard: step.shard_seed(shards[shard]),
    )


def _members(spec: AggregationSpec, everyone: dist.ProcessGroup, world_size: int) -> tuple[tuple[int, ...], ...]:
    if spec.sync_inside_nodes:
        return node_of_every_rank(everyone)
    size = world_size // (spec.groups or world_size)
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))
