"""The status exchange of workers: the requests of all workers and their compute times, known one step later.

A worker gets a signal, or reaches the checkpoint interval, at any moment, but all workers must save a checkpoint
after the same step. So at the end of every step each worker sends its status, and receives the status that was sent
at the end of the step before, during whose computation it was transferred: no worker waits.
"""

from __future__ import annotations

import enum
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Request(enum.IntEnum):
    """What a worker may request of all workers; the value is its index in the message."""

    SAVE = 0
    LEAVE = 1
    """After a checkpoint, end the run."""
    BUSY = 2
    """Begin no checkpoint: the previous one is still being written here."""
    FAILED = 3
    """Abandon the previous checkpoint: this worker could not write its shard."""
    STOP = 4
    """End the run as if its epochs were over."""


@dataclass(frozen=True)
class Status:
    """The status of all workers at the end of the previous step; the same on every worker."""

    requests: frozenset[Request]
    """The requests of any worker."""
    own_times_s: tuple[float, ...]
    """Step time of each worker, by rank, without waiting for others; 0 if unknown."""


class StatusExchange:
    """One worker's side of the exchange in a group whose backend handles tensors in CPU memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self._message = self._empty_message()
        self._in_flight: dist.Work | None = None

    def received(self) -> Status:
        """The status sent last, once; waits until all workers have sent theirs."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None
        numbers, self._message = self._message.tolist(), self._empty_message()  # each message counts once
        requests = frozenset(request for request in Request if numbers[request])
        return Status(requests, tuple(numbers[len(Request) :]))

    def send(self, requests: set[Request], own_time_s: float) -> None:
        """Begin to send this worker's status. A collective after every step, followed by `received`."""
        self._message = self._empty_message()
        for request in requests:
            self._message[request] = 1
        self._message[len(Request) + self._rank] = own_time_s
        if self._group is not None:
            # The maximum: any request counts, and each worker writes only its own entry.
            self._in_flight = dist.all_reduce(self._message, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _empty_message(self) -> torch.Tensor:
        """Room for the requests and the time of each worker."""
        return torch.zeros(len(Request) + self._world_size, dtype=torch.float64)


class SaveSignals:
    """SIGUSR1: save. SIGTERM and Ctrl-C: save and exit; a second one exits at once, by the previous handler."""

    def __init__(self) -> None:
        self.requests: set[Request] = set()
        self.is_interrupted = False
        """Whether Ctrl-C was pressed."""
        self._handlers: dict[int, Any] = {}
        """The previous ones, by the numbers of signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._leave)
        # Where Ctrl-C is ignored, as in the background of a shell, it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._leave)

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        self.requests.add(Request.SAVE)

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        self.requests.add(Request.LEAVE)
        self.is_interrupted |= number == signal.SIGINT
        signal.signal(number, self._handlers[number])

    def close(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
