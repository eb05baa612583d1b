"""Applies a plan to a model: virtual shards, and the engines that train it on all workers."""

from __future__ import annotations

from paceline.parallel.assignment import Assignment
from paceline.parallel.companions import Companion, Companions
from paceline.parallel.engine import Engine, StepInput
from paceline.parallel.engines.parallelize import parallelize

__all__ = ["Assignment", "Companion", "Companions", "Engine", "StepInput", "parallelize"]
