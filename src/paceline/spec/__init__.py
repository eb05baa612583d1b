"""The frozen values that the stages share: what to train, on what, how it is spread, and what happened."""

from __future__ import annotations

from paceline.spec.algorithm import AlgorithmName
from paceline.spec.cluster import Cluster, Device, Link, Node, StepRow
from paceline.spec.job import DataSpec, Job
from paceline.spec.plan import Mesh, PipelineSpec, Plan, parse_mesh
from paceline.spec.record import RunRecord

__all__ = [
    "AlgorithmName",
    "Cluster",
    "DataSpec",
    "Device",
    "Job",
    "Link",
    "Mesh",
    "Node",
    "PipelineSpec",
    "Plan",
    "RunRecord",
    "StepRow",
    "parse_mesh",
]
