"""A plan applied to a model: virtual shards, norm layers, and the ways in which workers train together."""

from __future__ import annotations

from paceline.parallel.aggregation import Aggregation, set_up_aggregation
from paceline.parallel.asynchronous import AsynchronousDataParallel, describe_asynchrony, open_servers
from paceline.parallel.bitwise import BitwiseDataParallel
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import Engine, StepInput, check_batch
from paceline.parallel.infrequent import InfrequentDataParallel, aggregator_inside_node, describe_meetings
from paceline.parallel.numeric import NumericDataParallel
from paceline.parallel.shards import Share, check_shards

__all__ = [
    "Aggregation",
    "AsynchronousDataParallel",
    "BitwiseDataParallel",
    "Clock",
    "Engine",
    "InfrequentDataParallel",
    "Mark",
    "NumericDataParallel",
    "Share",
    "StepInput",
    "aggregator_inside_node",
    "check_batch",
    "check_shards",
    "describe_asynchrony",
    "describe_meetings",
    "open_servers",
    "set_up_aggregation",
]
