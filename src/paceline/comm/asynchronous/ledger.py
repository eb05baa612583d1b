"""Who computes which shard, and what has arrived: bookkeeping without clocks, threads or messages.

Shards are given out in order, as leases; one whose lease has run out is given to the next who asks, so a shard may be
computed twice. It counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.comm.fixed_tree import Block, finish_tree


@dataclass(frozen=True)
class Task:
    """A virtual shard of a global batch, for one worker to compute."""

    batch: int
    shard: int


class Ledger:
    """Gives out the shards of batch after batch, as far ahead as the staleness allows.

    A shard of batch k is given out once all shards of all batches before k - staleness have arrived (stale synchronous
    parallel, Ho et al. 2013): from then on the parameters after k - staleness updates exist on all servers.
    """

    def __init__(
        self, num_shards: Callable[[int], int], staleness: int, lease_s: float = 60.0, first_batch: int = 0
    ) -> None:
        """
        Args:
            num_shards: the number of shards of a batch.
            lease_s: a shard that takes a worker longer is given to another one too.
        """
        self.finished = first_batch
        """All shards of all batches before this one have arrived."""
        self.next_batch = first_batch
        """No shard of this batch or of any behind it has been given out."""
        self._num_shards = num_shards
        self._staleness = staleness
        self._lease_s = lease_s
        self._missing: dict[int, set[int]] = {}
        self._leases: dict[Task, tuple[int, float]] = {}
        """Who computes a shard, and until when nobody else does."""

    def take(self, worker: int, until: int, now_s: float) -> Task | None:
        """The first shard of a batch before `until` that has not arrived and that nobody computes; None: not now."""
        while self.next_batch < min(until, self.finished + self._staleness + 1):
            self._missing[self.next_batch] = set(range(self._num_shards(self.next_batch)))
            self.next_batch += 1
        for task in (Task(batch, shard) for batch, shards in self._missing.items() for shard in sorted(shards)):
            _, until_s = self._leases.get(task, (0, now_s))
            if until_s <= now_s:
                self._leases[task] = worker, now_s + self._lease_s
                return task
        return None

    def arrive(self, task: Task) -> None:
        """The shard has come to every server, from whomever."""
        self._leases.pop(task, None)
        self._missing.get(task.batch, set()).discard(task.shard)
        while self.finished in self._missing and not self._missing[self.finished]:
            del self._missing[self.finished]
            self.finished += 1

    def give_back(self, worker: int) -> None:
        """`worker` is lost: others take what it had."""
        self._leases = {task: lease for task, lease in self._leases.items() if lease[0] != worker}


class ShardSum:
    """The sum over the shards of one batch in the order of `comm.fixed_tree`, in whichever order they come."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._arrived: set[int] = set()
        self._sums: dict[Block, Tensor] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._arrived) == self._num_shards

    def add(self, shard: int, values: Tensor) -> None:
        """Count a shard's values, a flat vector that is owned from now on, unless it has been counted before."""
        if shard in self._arrived:
            return
        self._arrived.add(shard)
        start, size, total = shard, 1, values
        # Siblings are added as soon as both are there: fewer vectors to hold, and the same tree.
        while (sibling := (start ^ size, size)) in self._sums:
            other = self._sums.pop(sibling)
            total = other.add_(total) if sibling[0] < start else total.add_(other)
            start, size = min(start, sibling[0]), 2 * size
        self._sums[start, size] = total

    def total(self) -> Tensor:
        """The sum over all shards; once, as it is formed in place."""
        return finish_tree(self._sums, self._num_shards)
