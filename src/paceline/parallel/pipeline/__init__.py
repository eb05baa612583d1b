"""Pipeline parallelism: a model cut into stages, each on a worker of its own, and micro-batches that pass through.

`Pipeline` is what an engine holds; limits and schedules are pure and know nothing of torch's processes.
"""

from paceline.parallel.pipeline.calls import MicroBatch, ModelCall
from paceline.parallel.pipeline.cut import stage_limits
from paceline.parallel.pipeline.pipeline import Pipeline
from paceline.parallel.pipeline.schedules import Action, Schedule, Simulation, make_schedule, simulate

__all__ = [
    "Action",
    "MicroBatch",
    "ModelCall",
    "Pipeline",
    "Schedule",
    "Simulation",
    "make_schedule",
    "simulate",
    "stage_limits",
]
