"""Applies a plan to a model: virtual shards, norm layers, and the engines that train it on all workers."""

from __future__ import annotations

from paceline.parallel.assignment import Assignment, check_shards
from paceline.parallel.bitwise import BitwiseDataParallel
from paceline.parallel.companions import Companion, Companions
from paceline.parallel.dp import DataParallel
from paceline.parallel.engine import AnyShard, Engine, StepInput
from paceline.parallel.local_sgd import LocalSGD
from paceline.parallel.parallelize import parallelize

__all__ = [
    "AnyShard",
    "Assignment",
    "BitwiseDataParallel",
    "Companion",
    "Companions",
    "DataParallel",
    "Engine",
    "LocalSGD",
    "StepInput",
    "check_shards",
    "parallelize",
]
