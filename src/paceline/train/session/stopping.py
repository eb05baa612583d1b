"""The end of a run before its epochs are over, on all workers after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.object_collectives import all_gather_objects
from paceline.train.batches.data_progress import DataProgress
from paceline.train.process.process_group import World


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
