"""Where each step's time goes, on rank 0's own clock."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Collection

import torch

from paceline.parallel.clock import Mark, seconds
from paceline.spec import StepTime

# The first steps warm caches and allocators; a median over a window of later ones is what lasts.
_WARMUP_STEPS = 3
_WINDOW_STEPS = 2000


def settle(device: torch.device) -> None:
    """Synchronise with the device, so that the clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepTimer:
    """Measures from the end of one step to the end of the next: waiting for data, computing, waiting for peers."""

    def __init__(self) -> None:
        self._steps = 0
        self._since = time.perf_counter()
        self._asked_at = self._since
        self._data_s = 0.0
        self._unread: deque[tuple[float, float, tuple[Mark, Mark]]] = deque()
        self._read: deque[StepTime] = deque(maxlen=_WINDOW_STEPS)
        self.train_s = 0.0

    def resume(self) -> None:
        """Start or restart timing; the time since the last step (an evaluation, say) is not counted."""
        self._since = time.perf_counter()

    def data_asked(self) -> None:
        self._asked_at = time.perf_counter()

    def data_arrived(self) -> None:
        self._data_s = time.perf_counter() - self._asked_at

    def step_ended(self, communication: tuple[Mark, Mark]) -> None:
        now = time.perf_counter()
        total_s, self._since = now - self._since, now
        self.train_s += total_s
        self._steps += 1
        if self._steps > _WARMUP_STEPS:
            self._unread.append((total_s, self._data_s, communication))
        self._data_s = 0.0  # a second step on the same batch waits for none
        # Marks on a GPU's time line are read two steps late, when they are surely past: reading never stalls it.
        while len(self._unread) > 2:
            self._read_oldest()

    def _read_oldest(self) -> None:
        total_s, data_s, (begin, end) = self._unread.popleft()
        exposed_s = max(0.0, seconds(begin, end))
        self._read.append(StepTime(total_s, data_s, max(0.0, total_s - data_s - exposed_s), exposed_s))

    @property
    def own_s(self) -> float:
        """Seconds of the last known step without waiting for other workers; 0 before any."""
        return self._read[-1].total_s - self._read[-1].exposed_comm_s if self._read else 0.0

    def recent(self, num_steps: int) -> StepTime:
        """The median of each component over the last steps known; on a GPU, the latest two are not yet."""
        return _median(list(self._read)[-num_steps:])

    def median(self) -> StepTime:
        """The median of each component; these medians need not add up to the median total exactly."""
        while self._unread:
            self._read_oldest()
        return _median(self._read)

    def p10_p90(self) -> tuple[float, float] | tuple[None, None]:
        """Seconds than which one step in ten was shorter, and one in ten longer; None before there are two steps."""
        while self._unread:
            self._read_oldest()
        if len(self._read) < 2:
            return None, None
        tenths = statistics.quantiles((step.total_s for step in self._read), n=10, method="inclusive")
        return tenths[0], tenths[-1]


def _median(steps: Collection[StepTime]) -> StepTime:
    if not steps:
        return StepTime()
    components = zip(*map(dataclasses.astuple, steps), strict=True)
    return StepTime(*map(statistics.median, components))
