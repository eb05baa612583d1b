"""Finds hangs: which workers hold up a run, from what all its workers are doing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.heartbeat import Vitals

STALE_S = 5.0
"""A worker without a heartbeat for this long is stuck outside Python, even if its last heartbeat showed progress."""
HANG_TIMEOUT_S = 60.0
"""How long workers of a `Run` wait for another one before that is a hang."""


class WatchClock:
    """Measures durations, counting only the time in which this process, the observer, was running itself.

    A worker that is stopped together with the others (SIGSTOP to all, a paused container, gang scheduling) must not
    report the pause as a hang afterwards.
    """

    def __init__(self, hang_timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Start measuring; `watched_s` must be called every `interval_s` seconds."""
        self._now = now
        self.interval_s = min(1.0, hang_timeout_s / 10)
        """How often a worker posts its state, and looks at those of others."""
        self._looked_at = now()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=100)

    def watched_s(self, seconds: float) -> float:
        """The number of the last `seconds` in which this process ran."""
        looked_at, self._looked_at = self._looked_at, self._now()
        if self._looked_at - looked_at > 2 * self.interval_s:
            self._pauses.append((looked_at + self.interval_s, self._looked_at))
        began = self._looked_at - seconds
        return seconds - sum(end - max(start, began) for start, end in tuple(self._pauses) if end > began)


@dataclass(frozen=True, kw_only=True)
class WorkerState(Vitals):
    """What a running worker was doing at one moment; seconds in which the observer did not run itself do not count."""

    rank: int
    pid: int
    hostname: str = ""
    local_rank: int = 0
    heartbeat_age_s: float | None = None
    """Seconds since it last posted its state; None: not known."""
    memory_bytes: int | None = None
    """Memory of the process that lies in RAM; None: not known."""

    @property
    def doing(self) -> str:
        """The state as a phrase for a report."""
        if self.inside_s is not None:
            return f"in {self.collective} for {self.inside_s:.1f} s"
        return f"in no collective; its last was {self.collective}" if self.collective else "in no collective so far"

    @property
    def line(self) -> str:
        """The worker's line in a report."""
        step = "" if self.step is None else f"step {self.step}, "
        return f"rank {self.rank} (pid {self.pid} on {self.hostname}): {step}{self.doing}"


@dataclass(frozen=True)
class Hang:
    """A run that makes no progress."""

    kind: Literal["hung", "mismatch"]
    culprits: tuple[int, ...]
    """The ranks that the others wait for; all ranks if `kind` is "mismatch"."""
    waiting: tuple[int, ...]
    seconds: float


def find_hang(states: Sequence[WorkerState], bound_s: float) -> Hang | None:
    """Find a hang in the `states` of all workers; None unless something has lasted for `bound_s`.

    A worker that computes for long is no hang unless another one waits for it.
    """
    waiting = [state for state in states if _waits(state, bound_s)]
    if not waiting:
        return None
    ranks, longest_s = tuple(state.rank for state in waiting), max(state.inside_s or 0.0 for state in waiting)
    if len(waiting) == len(states):
        return Hang("mismatch", ranks, ranks, longest_s)
    # A worker that has just entered the same collective has ended the wait; the next check will show it.
    awaited = tuple(state.rank for state in states if state not in waiting and not _waits(state, 0.0))
    return Hang("hung", awaited, ranks, longest_s) if awaited else None


def _waits(state: WorkerState, bound_s: float) -> bool:
    """Whether the worker has been in a collective for that long while its interpreter still runs."""
    if state.inside_s is None or state.inside_s < bound_s:
        return False
    return state.heartbeat_age_s is None or state.heartbeat_age_s < STALE_S
