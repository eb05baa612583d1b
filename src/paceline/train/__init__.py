"""Training: `Run`, the object users hold, and `loop.py`, the training loop over a job, which is best read first."""

from __future__ import annotations

from paceline.train.initialize import init
from paceline.train.run import Run
from paceline.train.training import Callback

__all__ = ["Callback", "Run", "init"]
