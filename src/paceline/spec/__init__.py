"""The frozen values that the stages share: what to train, on what, how it is spread, and what happened."""

from __future__ import annotations

from paceline.spec.algorithm import AlgorithmName as AlgorithmName
from paceline.spec.cluster import Cluster as Cluster
from paceline.spec.cluster import Device as Device
from paceline.spec.cluster import Link as Link
from paceline.spec.cluster import Node as Node
from paceline.spec.cluster import StepRow as StepRow
from paceline.spec.job import DataSpec as DataSpec
from paceline.spec.job import Job as Job
from paceline.spec.plan import Mesh as Mesh
from paceline.spec.plan import PipelineSpec as PipelineSpec
from paceline.spec.plan import Plan as Plan
from paceline.spec.plan import parse_mesh as parse_mesh
from paceline.spec.record import RunRecord as RunRecord
