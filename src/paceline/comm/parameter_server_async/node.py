"""A node that acts as one worker: its leader, the first, speaks for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.tree_exact import Block, TreeSum
from paceline.errors import PeerLost

T = TypeVar("T")


@dataclass(frozen=True)
class ShardResult:
    """What came of one shard."""

    gradient: Tensor
    """All parameters', flattened and laid one after the other; zero where there is none."""
    used: Tensor
    """For every parameter whether it has a gradient at all."""
    statistics: Tensor


@dataclass(frozen=True)
class RunResult:
    """What came of a run of shards: sums over aligned blocks of `comm.tree_exact`."""

    blocks: tuple[Block, ...]
    gradients: tuple[Tensor, ...]
    used: Tensor
    statistics: tuple[Tensor, ...]


@dataclass(frozen=True)
class Node:
    """Some workers that share what one of them says and hears; often only one."""

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
        outcome: list[tuple[Any, PeerLost | None]] = [(None, None)]
        if self.leads:
            try:
                outcome = [(act(), None)]
            except PeerLost as error:
                outcome = [(None, error)]
        dist.broadcast_object_list(outcome, src=self.ranks[0], group=self.group)
        result, failure = outcome[0]
        if failure is not None:
            raise failure
        return cast(T, result)

    def share(self, values: Tensor) -> None:
        """The leader's values for all."""
        if len(self.ranks) > 1:
            dist.broadcast(values, src=self.ranks[0], group=self.group)

    def add(self, first_shard: int, mine: ShardResult | None) -> RunResult | None:
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
        # The large part travels as a tensor, the rest as an object that says whether there is one.
        small = None if mine is None else (mine.used, mine.statistics)
        gathered: list[Any] | None = [None] * len(self.ranks) if self.leads else None
        dist.gather_object(small, gathered, dst=self.ranks[0], group=self.group)
        if gathered is None:
            if mine is not None:
                dist.send(mine.gradient, dst=self.ranks[0], group=self.group)
            return None
        assert mine is not None
        results = [mine]
        for rank, others in zip(self.ranks[1:], gathered[1:], strict=True):
            if others is not None:
                gradient = torch.empty_like(mine.gradient)
                dist.recv(gradient, src=rank, group=self.group)
                results.append(ShardResult(gradient, *others))
        return _sums(first_shard, results)


def _sums(first_shard: int, results: Sequence[ShardResult]) -> RunResult:
    gradients, statistics = TreeSum(first_shard), TreeSum(first_shard)
    used = results[0].used
    for result in results:
        gradients.push(result.gradient)
        statistics.push(result.statistics)
        used = used | result.used
    return RunResult(tuple(gradients.blocks), tuple(gradients.partials), used, tuple(statistics.partials))
