"""A plan applied to a model: virtual shards, norm layers, and the ways in which workers train together."""

from __future__ import annotations

from paceline.parallel.asynchronous import AsynchronousDataParallel, open_servers
from paceline.parallel.bitwise import BitwiseDataParallel
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import Engine, StepInput, check_batch, unwrapped
from paceline.parallel.infrequent import InfrequentDataParallel
from paceline.parallel.numeric import NumericDataParallel
from paceline.parallel.parallelize import Parallelized, parallelize
from paceline.parallel.shards import Share, check_shards

__all__ = [
    "AsynchronousDataParallel",
    "BitwiseDataParallel",
    "Clock",
    "Engine",
    "InfrequentDataParallel",
    "Mark",
    "NumericDataParallel",
    "Parallelized",
    "Share",
    "StepInput",
    "check_batch",
    "check_shards",
    "open_servers",
    "parallelize",
    "unwrapped",
]
