"""Pipeline parallelism: a model cut into stages, each on a worker of its own, and micro-batches that pass through.

`Pipeline` is what an engine holds; limits and schedules are pure and know nothing of torch's processes.
"""

from paceline.parallel.pipeline.calls import MicroBatch, ModelCall
from paceline.parallel.pipeline.cut import stage_limits
from paceline.parallel.pipeline.pipeline import Pipeline

__all__ = ["MicroBatch", "ModelCall", "Pipeline", "stage_limits"]
