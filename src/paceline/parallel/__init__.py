"""A plan applied to a model: virtual shards, norm layers, and the two ways of adding gradients."""

from __future__ import annotations

from paceline.parallel.bitwise import BitwiseDataParallel
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import Engine, StepInput, check_batch
from paceline.parallel.numeric import NumericDataParallel
from paceline.parallel.shards import Share, check_shards

__all__ = [
    "BitwiseDataParallel",
    "Clock",
    "Engine",
    "Mark",
    "NumericDataParallel",
    "Share",
    "StepInput",
    "check_batch",
    "check_shards",
]
