"""The workers' exchange of status: what any of them requests and how long each computes, known one step later.

A worker gets a signal, or notices that two minutes are over, at a moment of its own. What follows from it, saving a
checkpoint, all have to do after the same step. So at the end of every step each worker sends its status, and receives
what was sent at the end of the step before, which has travelled while the step was computed: nobody waits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Request(enum.IntEnum):
    """What a worker may request of all; its place in the message."""

    SAVE = 0
    LEAVE = 1
    """After a checkpoint, end the run."""
    BUSY = 2
    """Begin no checkpoint: the one before is still being written here."""
    FAILED = 3
    """Give up the checkpoint before: this worker could not write its shard of it."""


@dataclass(frozen=True)
class Status:
    """What all workers sent at the end of the step before; the same on every worker."""

    requests: frozenset[Request]
    """Those of any worker."""
    own_times_s: tuple[float, ...]
    """What its step took each worker, by rank, without waiting for others; 0 where it does not know."""


class StatusExchange:
    """One worker's side; the others are those of a group whose backend handles numbers in host memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self._message = torch.zeros(len(Request) + self._world_size, dtype=torch.float64)
        self._in_flight: dist.Work | None = None

    def received(self) -> Status:
        """What was sent last; waits until all have sent it."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        numbers = self._message.tolist()
        return Status(frozenset(request for request in Request if numbers[request]), tuple(numbers[len(Request) :]))

    def send(self, requests: set[Request], own_time_s: float) -> None:
        """Begin to send this worker's status. A collective after every step, followed by `received`."""
        self._message = torch.zeros(len(Request) + self._world_size, dtype=torch.float64)
        for request in requests:
            self._message[request] = 1
        self._message[len(Request) + self._rank] = own_time_s
        if self._group is not None:
            # The largest: any request is a request, and nobody else writes into a worker's own place.
            self._in_flight = dist.all_reduce(self._message, dist.ReduceOp.MAX, group=self._group, async_op=True)
