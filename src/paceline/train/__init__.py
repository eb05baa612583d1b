"""Training: `Run`, the object users hold, and `loop.py`, the training loop over a job, which is best read first."""

from __future__ import annotations

from paceline.train.callbacks import Callback
from paceline.train.run import Run, init

__all__ = ["Callback", "Run", "init"]
