"""Training: `Run`, the object users hold, and the loop over a job that everybody reads first."""

from __future__ import annotations

from paceline.train.initialize import init
from paceline.train.run import Run

__all__ = ["Run", "init"]
