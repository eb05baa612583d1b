"""How long something takes, and how much of a budget is left. Loads torch only where a device has to be waited for."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seconds_of(action: Callable[[], object], *devices: torch.device) -> float:
    """Seconds until `action` has returned and `devices` have done what it gave them."""
    _wait_for(devices)
    began = time.perf_counter()
    action()
    _wait_for(devices)
    return time.perf_counter() - began


def median_s(action: Callable[[], object], num_rounds: int, *devices: torch.device, num_warmup: int = 1) -> float:
    """Median seconds of `num_rounds` calls, after `num_warmup` that do not count: they connect, and touch memory."""
    times = [seconds_of(action, *devices) for _ in range(num_warmup + num_rounds)]
    return statistics.median(times[num_warmup:])


def _wait_for(devices: tuple[torch.device, ...]) -> None:
    if devices:
        from paceline.train.meters import settle

        for device in devices:
            settle(device)


class Stopwatch:
    """Seconds since it was made, and what they leave of a budget."""

    def __init__(self, budget_s: float = math.inf) -> None:
        self.budget_s = budget_s
        self._began = time.perf_counter()

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self._began

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s
