"""The frozen values that the stages share: what to train, on what, how it is spread, and what happened."""

from __future__ import annotations

from paceline.spec.algorithm import AlgorithmName
from paceline.spec.cluster import Cluster, Device, Link, Node, Peripheral
from paceline.spec.job import DataSpec, Job
from paceline.spec.mesh import Mesh, parse_mesh
from paceline.spec.plan import PipelineSpec, Plan
from paceline.spec.record import RunRecord
from paceline.spec.step_row import StepRow

__all__ = [
    "AlgorithmName",
    "Cluster",
    "DataSpec",
    "Device",
    "Job",
    "Link",
    "Mesh",
    "Node",
    "Peripheral",
    "PipelineSpec",
    "Plan",
    "RunRecord",
    "StepRow",
    "parse_mesh",
]
