"""A clock that only moves when it is told to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeTime:
    """Stands in for the module `time`."""

    now_s: float = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds
