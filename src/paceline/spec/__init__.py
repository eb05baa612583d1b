"""The frozen values that the stages share: what to train, on what, how it is spread, and what happened."""

from __future__ import annotations

from paceline.spec.aggregation import AggregationSpec
from paceline.spec.algorithm import AlgorithmName
from paceline.spec.cluster import (
    Cluster,
    Device,
    DeviceKind,
    ForecastCheck,
    JobTiming,
    Link,
    Node,
    Peripheral,
)
from paceline.spec.evaluation import EvaluationRecord
from paceline.spec.job import (
    CallbackSpec,
    CheckpointSpec,
    DataSpec,
    Job,
    ModelSpec,
    load_job,
)
from paceline.spec.mesh import Mesh
from paceline.spec.mesh_name import check_mesh, parse_mesh
from paceline.spec.optim import OptimSpec
from paceline.spec.plan import NodePlacement, PipelineSpec, Plan
from paceline.spec.record import EpochRecord, RunRecord, StepTime
from paceline.spec.step_row import StepRow

__all__ = [
    "AggregationSpec",
    "AlgorithmName",
    "CallbackSpec",
    "CheckpointSpec",
    "Cluster",
    "DataSpec",
    "Device",
    "DeviceKind",
    "EpochRecord",
    "EvaluationRecord",
    "ForecastCheck",
    "Job",
    "JobTiming",
    "Link",
    "Mesh",
    "ModelSpec",
    "Node",
    "NodePlacement",
    "OptimSpec",
    "Peripheral",
    "PipelineSpec",
    "Plan",
    "RunRecord",
    "StepRow",
    "StepTime",
    "check_mesh",
    "load_job",
    "parse_mesh",
]
