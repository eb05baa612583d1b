"""Applies a plan to a model: virtual shards, and the engines that train it on all workers."""

from __future__ import annotations

from paceline.parallel.engine import Engine
from paceline.parallel.parallelize import parallelize
from paceline.parallel.pass_state import Buffers
from paceline.parallel.step_input import Assignment, Companions, StepInput

__all__ = ["Assignment", "Buffers", "Companions", "Engine", "StepInput", "parallelize"]
