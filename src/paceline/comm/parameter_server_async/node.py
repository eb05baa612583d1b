"""A node that acts as one worker: its leader, the first, speaks for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from paceline.comm.fixed_tree import Block, TreeSum
from paceline.comm.parameter_server_async.messages import MESSAGES
from paceline.errors import PeerLost
from paceline.object_collectives import broadcast_object, gather_objects

T = TypeVar("T")


@dataclass(frozen=True)
class ShardResult:
    """The result of one shard."""

    gradient: Tensor
    """All parameters', flattened, one after the other, in host memory; zero where there is none."""
    used: Tensor
    """For every parameter whether it has a gradient at all."""
    statistics: Tensor


@dataclass(frozen=True)
class ShardSums:
    """The result of consecutive shards: sums over aligned blocks of `comm.fixed_tree`."""

    blocks: tuple[Block, ...]
    gradients: tuple[Tensor, ...]
    used: Tensor
    statistics: tuple[Tensor, ...]


@dataclass(frozen=True)
class NodeWorkers:
    """The workers of a node that act as one: the first speaks for all of them. Often there is only one."""

    ranks: Sequence[int]
    rank: int
    """This worker's."""
    group: dist.ProcessGroup | None
    """All of its workers, where there are more than one."""

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def on_leader(self, act: Callable[[], T]) -> T:
        """What `act` returns on the leader, for all; or the `PeerLost` that it raises there."""
        if len(self.ranks) == 1:
            return act()
        result: Any = None
        failure: tuple[str, int | None] | None = None
        if self.leads:
            try:
                result = act()
            except PeerLost as error:
                failure = str(error), error.rank
        result, failure = broadcast_object((result, failure), self.group, MESSAGES)
        if failure is not None:
            raise PeerLost(failure[0], rank=failure[1])
        return cast(T, result)

    def share(self, values: Tensor) -> None:
        """The leader's values for all."""
        if len(self.ranks) > 1:
            dist.broadcast(values, src=self.ranks[0], group=self.group)

    def add(self, first_shard: int, mine: ShardResult | None) -> ShardSums | None:
        """Add what the workers of this node computed of neighbouring shards, one each from the leader on.

        Args:
            first_shard: the leader's.
            mine: None where there was no shard for this worker.

        Returns:
            The sums on the leader, None on the others.
        """
        if len(self.ranks) == 1:
            assert mine is not None
            return _sums(first_shard, [mine])
        results = gather_objects(mine, self.group, (ShardResult,))
        return None if results is None else _sums(first_shard, [result for result in results if result is not None])


def _sums(first_shard: int, results: Sequence[ShardResult]) -> ShardSums:
    gradients, statistics = TreeSum(first_shard), TreeSum(first_shard)
    used = results[0].used
    for result in results:
        gradients.push(result.gradient)
        statistics.push(result.statistics)
        used = used | result.used
    return ShardSums(tuple(gradients.blocks), tuple(gradients.partials), used, tuple(statistics.partials))
