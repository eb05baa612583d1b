"""Forecasts of runs: the planner's forecast goes into the plan, its check against the run into cluster.json."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ClusterError, JobError, reason_of
from paceline.spec import Cluster, ForecastCheck, Job, Plan, RunRecord
from paceline.workflows.jobs import Say

CLUSTER_FILE = Path("cluster.json")


def with_forecasts(job: Job, plans: Sequence[Plan], cluster_file: Path, say: Say) -> list[Plan]:
    """The plans, each with its forecast; unchanged if this job was not probed, or where they are meshes, for the steps
    of a probe are those of whole replicas.

    Raises:
        ClusterError: there is a file, but it cannot be read.
    """
    cluster = Cluster.load(cluster_file) if cluster_file.exists() else None
    if cluster is None or not any(timing.job == job.name for timing in cluster.timings):
        return list(plans)
    meshed = [plan.mesh is not None and not plan.mesh.is_plain for plan in plans]
    if any(meshed):
        say("paceline: no forecast of a mesh: the steps that were probed are those of whole replicas")
    if all(meshed):
        return list(plans)
    from paceline.plan.forecast import forecast  # NumPy and SciPy: not for those who have not probed

    try:
        rows = forecast(job, cluster, sorted({1, *(plan.world_size for plan in plans)})).rows
    except (ClusterError, JobError) as problem:  # the job has changed since it was probed, or a link was not measured
        say(f"paceline: no forecast: {problem}")
        return list(plans)
    expected = {row.devices: row.samples_per_s for row in rows if not row.objection and not row.placement}
    return [
        plan if is_meshed else dataclasses.replace(plan, forecast_samples_per_s=expected.get(plan.world_size))
        for plan, is_meshed in zip(plans, meshed, strict=True)
    ]


def without_forecasts(plan: Plan) -> Plan:
    """The plan without its forecast, to compare runs."""
    return dataclasses.replace(plan, forecast_samples_per_s=None)


def feed_back(record: RunRecord, cluster_file: Path) -> None:
    """Write the error of this run's forecast, if it had one, to cluster.json."""
    forecast = record.plan.forecast_samples_per_s
    if not forecast:
        return
    try:
        check = ForecastCheck(record.job.name, record.world_size, forecast, record.samples_per_s)
        Cluster.load(cluster_file).checked(check).save(cluster_file)
    except (OSError, ClusterError) as problem:  # the run is good nevertheless
        print(
            f"paceline: The forecast's error cannot be noted in {cluster_file}: {reason_of(problem)}", file=sys.stderr
        )
