"""Applies a plan to a model: virtual shards, norm layers, and the engines that train it on all workers."""

from __future__ import annotations

from paceline.parallel.assignment import Assignment
from paceline.parallel.companions import Companion, Companions
from paceline.parallel.engine import Engine, StepInput
from paceline.parallel.parallelize import parallelize

__all__ = ["Assignment", "Companion", "Companions", "Engine", "StepInput", "parallelize"]
