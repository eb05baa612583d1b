"""What any worker wishes becomes known to all of them one step later, at no wait.

A worker gets a signal, or notices that two minutes are over, at a moment of its own. What follows from it, saving a
checkpoint, all have to do after the same step. So at the end of every step each worker tells its wishes and reads
what was told at the end of the step before, which has travelled while the step was computed.
"""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist


class Wish(enum.IntEnum):
    """A place in the message."""

    SAVE = 0
    LEAVE = 1
    """After a checkpoint, end the run."""
    BUSY = 2
    """Still writing the checkpoint before."""
    FAILED = 3
    """A part of the checkpoint before could not be written."""


class Agreement:
    """One worker's voice among all of a group whose backend sums numbers in host memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._wishes = torch.zeros(len(Wish), dtype=torch.int32)
        self._under_way: dist.Work | None = None

    def heard(self) -> frozenset[Wish]:
        """What any worker told at the end of the step before; the same on all of them."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        return frozenset(wish for wish in Wish if self._wishes[wish])

    def tell(self, wishes: set[Wish]) -> None:
        """Begin to tell the others. Every worker has to, after every step, and then to listen."""
        self._wishes = torch.tensor([int(wish in wishes) for wish in Wish], dtype=torch.int32)
        if self._group is not None:
            self._under_way = dist.all_reduce(self._wishes, dist.ReduceOp.MAX, group=self._group, async_op=True)
