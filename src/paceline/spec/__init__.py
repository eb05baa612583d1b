"""The frozen values that the stages share: what to train, on what, how it is spread, and what happened."""

from __future__ import annotations

from paceline.spec.cluster import Cluster, Device
from paceline.spec.job import (
    AggregationSpec,
    CheckpointSpec,
    DataSpec,
    Job,
    ModelSpec,
    OptimSpec,
    load_job,
)
from paceline.spec.plan import AlgorithmName, Plan
from paceline.spec.record import EpochRecord, RunRecord, StepTime

__all__ = [
    "AggregationSpec",
    "AlgorithmName",
    "CheckpointSpec",
    "Cluster",
    "DataSpec",
    "Device",
    "EpochRecord",
    "Job",
    "ModelSpec",
    "OptimSpec",
    "Plan",
    "RunRecord",
    "StepTime",
    "load_job",
]
