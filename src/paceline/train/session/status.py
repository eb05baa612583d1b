"""What workers tell each other after every step: their requests and compute times; and what follows from these.

A worker gets a signal, or reaches the checkpoint interval, at any moment, but all workers must save a checkpoint
after the same step. So at the end of every step each worker sends its status, and receives the status that was sent
at the end of the step before, during whose computation it was transferred: no worker waits.
"""

from __future__ import annotations

import enum
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from paceline.object_collectives import all_gather_objects
from paceline.train.batches.data_progress import DataProgress
from paceline.train.process.process_group import World

WINDOW_STEPS = 50
"""The number of steps whose median times are compared, so that single slow steps do not count."""

SLOW = 1.3
"""A straggler takes this many times the median of the others; less is the usual scatter of equal devices."""


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


@dataclass
class Stopping:
    """Whether the run ends early. Any worker may ask for it; all workers agree on when, and on why."""

    world: World
    progress: DataProgress
    begun_at: float
    """When the run was launched, in seconds since the epoch."""
    max_minutes: float | None = None
    """How long it may take, by the clock of rank 0."""
    clock: Callable[[], float] = time.time
    reason: str | None = None
    """Why the run ends early, once all workers agree that it does."""
    is_out_of_time: bool = False
    """Whether it ends because of `max_minutes`, so that there is more to train."""
    _own: str | None = None
    _is_late: bool = False

    @property
    def is_over(self) -> bool:
        """Whether no step is left, because of `max_steps`, or because the run was stopped."""
        return self.progress.steps_left == 0

    def ask(self, reason: str) -> None:
        """Ask for the end of the run; no collective. The first reason of the lowest rank counts."""
        self._own = self._own or reason

    def is_wanted(self) -> bool:
        """Whether this worker asks for the end, of which it tells the others; called after steps.

        Time is looked at here alone: every start makes at least one step, however long it took to begin.
        """
        if self.reason is not None:
            return False
        if self.max_minutes is not None and self.world.rank == 0:
            self._is_late |= self.clock() >= self.begun_at + 60 * self.max_minutes
        return self._is_late or self._own is not None

    def agree(self) -> None:
        """End the run if any worker has asked for it. A collective of all workers."""
        if self.reason is not None:
            return
        late = f"max_minutes = {self.max_minutes:g} are over" if self._is_late and self._own is None else None
        asked = all_gather_objects([self._own or late, late is not None], self.world.group)
        reasons = [(reason, is_late) for reason, is_late in asked if reason is not None]
        if reasons:
            self.reason, self.is_out_of_time = reasons[0]
            self.progress.end_here()


class Stragglers:
    """Compares the workers' own step times, one window of steps at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the display name of each worker, by rank."""
        self._names = names
        self._times: list[deque[float]] = [deque(maxlen=WINDOW_STEPS) for _ in names]
        self._num_steps = 0
        self._slow: set[int] = set()

    def note(self, step: int, own_times_s: Sequence[float]) -> list[str]:
        """A sentence for every worker that has become slow, or is no longer, in the window that ends with `step`.

        Args:
            own_times_s: step time of each worker, by rank, without waiting for others; 0 if unknown.
        """
        for times, own_time_s in zip(self._times, own_times_s, strict=True):
            if own_time_s > 0:
                times.append(own_time_s)
        self._num_steps += 1
        if self._num_steps % WINDOW_STEPS or len(self._names) < 2:
            return []
        medians = {rank: statistics.median(times) for rank, times in enumerate(self._times) if times}
        sentences = []
        for rank, own_s in medians.items():
            # Beside the others alone: of two workers, one is half of any median.
            others_s = statistics.median([s for other, s in medians.items() if other != rank] or [own_s])
            if own_s > SLOW * others_s and rank not in self._slow:
                self._slow.add(rank)
                since = max(1, step - WINDOW_STEPS + 1)
                sentences.append(
                    f"{self._names[rank]} holds the others up since about step {since}: its part of a step takes "
                    f"{1e3 * own_s:.3g} ms, {own_s / others_s:.1f} times the median of the others."
                )
            elif own_s <= SLOW * others_s and rank in self._slow:
                self._slow.remove(rank)
                sentences.append(f"{self._names[rank]} is as fast as the others again at step {step}.")
        return sentences
