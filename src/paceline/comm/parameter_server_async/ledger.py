"""Who computes which shard, and what has arrived: bookkeeping without clocks, threads or messages.

The unit of work is a virtual shard of a global batch. Shards are given out in order, as leases; a lease that is not
kept is given to somebody else, so a shard may be computed twice. It counts once: sums know what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.comm.fixed_tree import Block, finish_tree
from paceline.comm.parameter_server_async.messages import Task


@dataclass(frozen=True)
class _Lease:
    task: Task
    worker: int
    ends_at_s: float


class Ledger:
    """Gives out the shards of batch after batch, as far ahead as the staleness allows.

    A shard of batch k is given out once all shards of all batches before k - staleness have arrived (stale synchronous
    parallel, Ho et al. 2013): from then on the parameters after k - staleness updates exist everywhere.
    """

    def __init__(
        self, num_shards: Callable[[int], int], staleness: int, lease_s: float = 60.0, first_batch: int = 0
    ) -> None:
        self.finished = first_batch
        """All shards of all batches before this one have arrived."""
        self._num_shards = num_shards
        self._staleness = staleness
        self._lease_s = lease_s
        self.next_batch = first_batch
        """No shard of this batch or of any behind it has been given out."""
        self._next_lease = 0
        self._missing: dict[int, set[int]] = {}
        self._waiting: dict[int, set[int]] = {}
        # Every missing shard of an open batch waits, or is in exactly one lease.
        self._leases: dict[int, _Lease] = {}
        self._alone: dict[int, set[int]] = {}

    def take(self, worker: int, most: int, until: int, now_s: float) -> Task | None:
        """Up to `most` neighbouring shards of the first batch before `until` that has any; None: not now."""
        while self.next_batch < min(until, self.finished + self._staleness + 1):
            shards = range(self._num_shards(self.next_batch))
            self._missing[self.next_batch] = set(shards)
            self._waiting[self.next_batch] = set(shards)
            self.next_batch += 1
        batch = min((b for b, shards in self._waiting.items() if shards and b < until), default=None)
        if batch is None:
            return None
        waiting, alone = self._waiting[batch], self._alone.get(batch, set())
        start = min(waiting)
        stop = start + 1
        while stop - start < most and stop in waiting and not {start, stop} & alone:
            stop += 1
        task = Task(self._next_lease, batch, start, stop)
        self._next_lease += 1
        waiting -= set(task.shards)
        self._leases[task.lease] = _Lease(task, worker, now_s + self._lease_s)
        return task

    def finish(self, task: Task, arrived: bool) -> None:
        """The worker is done with `task`; `arrived`: every server has all of its shards, by whomever.

        If not, one of them had come from somebody else before and kept the sum of all from being counted: they go to
        the next who asks, one at a time.
        """
        if arrived:
            self._leases.pop(task.lease, None)
            for shards in (self._missing, self._waiting):
                shards.get(task.batch, set()).difference_update(task.shards)
            while self.finished in self._missing and not self._missing[self.finished]:
                for open_batches in (self._missing, self._waiting, self._alone):
                    open_batches.pop(self.finished, None)
                self.finished += 1
        elif task.lease in self._leases:
            self._alone.setdefault(task.batch, set()).update(task.shards)
            self._return(task.lease)

    def give_back(self, worker: int) -> None:
        """`worker` is lost: others take what it had."""
        for lease in [number for number, lease in self._leases.items() if lease.worker == worker]:
            self._return(lease)

    def expire(self, now_s: float) -> None:
        """Whoever kept shards too long may still deliver them, but others may take them too."""
        for lease in [number for number, lease in self._leases.items() if lease.ends_at_s <= now_s]:
            self._return(lease)

    def _return(self, lease: int) -> None:
        task = self._leases.pop(lease).task
        if task.batch in self._missing:
            self._waiting[task.batch] |= self._missing[task.batch] & set(task.shards)


class ShardSum:
    """The sum over the shards of one batch in the order of `comm.fixed_tree`, however and whenever they come."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._arrived: set[int] = set()
        self._sums: dict[Block, Tensor] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._arrived) == self._num_shards

    def add(self, blocks: Sequence[Block], sums: Sequence[Tensor]) -> bool:
        """Count the sums, flat vectors, of aligned blocks, unless a shard of theirs is in; they are owned from now on.

        Returns whether all shards of all blocks are in now.
        """
        for (start, size), total in zip(blocks, sums, strict=True):
            shards = range(start, start + size)
            if self._arrived.isdisjoint(shards):
                self._arrived.update(shards)
                self._keep((start, size), total)
        return all(self._arrived.issuperset(range(start, start + size)) for start, size in blocks)

    def _keep(self, block: Block, total: Tensor) -> None:
        """Add siblings as soon as both are there: fewer vectors to hold, and the same tree."""
        start, size = block
        sibling = (start ^ size, size)
        if sibling not in self._sums:
            self._sums[block] = total
        elif sibling < block:
            self._keep((sibling[0], 2 * size), self._sums.pop(sibling).add_(total))
        else:
            self._keep((start, 2 * size), total.add_(self._sums.pop(sibling)))

    def total(self) -> Tensor:
        """The sum over all shards; once, as it is formed in place."""
        return finish_tree(self._sums, self._num_shards)
