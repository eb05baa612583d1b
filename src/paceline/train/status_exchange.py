"""What any worker requests, and how long each one computed, known to all of them one step later, at no wait.

A worker gets a signal, or notices that two minutes are over, at a moment of its own. What follows from it, saving a
checkpoint, all have to do after the same step. So at the end of every step each worker tells its requests and reads
what was told at the end of the step before, which has travelled while the step was computed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Request(enum.IntEnum):
    """A place in the message."""

    SAVE = 0
    LEAVE = 1
    """After a checkpoint, end the run."""
    BUSY = 2
    """Still writing the checkpoint before."""
    FAILED = 3
    """A part of the checkpoint before could not be written."""


@dataclass(frozen=True)
class Status:
    """What was told at the end of the step before; the same on all workers."""

    requests: frozenset[Request]
    """Of any worker."""
    own_times_s: tuple[float, ...]
    """Of each worker, by rank: what its step took without waiting for others; 0 where it does not know."""


class StatusExchange:
    """One worker's voice among all of a group whose backend handles numbers in host memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self._message = torch.zeros(len(Request) + self._world_size, dtype=torch.float64)
        self._under_way: dist.Work | None = None

    def received(self) -> Status:
        """What was told last; waits until all have told it."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        numbers = self._message.tolist()
        return Status(frozenset(request for request in Request if numbers[request]), tuple(numbers[len(Request) :]))

    def send(self, requests: set[Request], own_time_s: float) -> None:
        """Begin to send the others. Every worker has to, after every step, and then to listen."""
        self._message = torch.zeros(len(Request) + self._world_size, dtype=torch.float64)
        for request in requests:
            self._message[request] = 1
        self._message[len(Request) + self._rank] = own_time_s
        if self._group is not None:
            # The largest: any request is a request, and nobody else writes into a worker's own place.
            self._under_way = dist.all_reduce(self._message, dist.ReduceOp.MAX, group=self._group, async_op=True)
