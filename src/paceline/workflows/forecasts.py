"""Forecasts of runs: the planner's forecast goes into the plan, its check against the run into cluster.json."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ClusterError, JobError
from paceline.spec import Cluster, ForecastCheck, Job, Plan, RunRecord
from paceline.workflows.jobs import Say, silent

CLUSTER_FILE = Path("cluster.json")


def with_forecasts(job: Job, plans: Sequence[Plan], cluster_file: Path, say: Say = silent) -> list[Plan]:
    """The plans, each with its forecast; unchanged if this job was not probed.

    Raises:
        ClusterError: there is a file, but it cannot be read.
    """
    if not cluster_file.exists():
        return list(plans)
    cluster = Cluster.load(cluster_file)
    if not any(timing.job == job.name for timing in cluster.timings):
        return list(plans)
    from paceline.plan.forecast import forecast  # NumPy and SciPy: not for those who have not probed

    try:
        rows = forecast(job, cluster, sorted({1, *(plan.world_size for plan in plans)})).rows
    except (ClusterError, JobError) as problem:  # the job has changed since it was probed, or a link was not measured
        say(f"paceline: no forecast: {problem}")
        return list(plans)
    expected = {row.devices: row.samples_per_s for row in rows if not row.objection}
    return [dataclasses.replace(plan, forecast_samples_per_s=expected.get(plan.world_size)) for plan in plans]


def without_forecasts(plan: Plan) -> Plan:
    """The plan without its forecast, to compare runs."""
    return dataclasses.replace(plan, forecast_samples_per_s=None)


def feed_back(records: Sequence[RunRecord], cluster_file: Path) -> None:
    """Write the errors of these runs' forecasts to cluster.json."""
    runs = [record for record in records if record.plan.forecast_samples_per_s]
    if not runs:
        return
    try:
        _feed_back(runs, cluster_file)
    except (OSError, ClusterError) as problem:  # the run is good nevertheless
        print(f"paceline: The forecast's error cannot be noted in {cluster_file}: {problem}", file=sys.stderr)


def _feed_back(runs: Sequence[RunRecord], cluster_file: Path) -> None:
    cluster = Cluster.load(cluster_file)
    for record in runs:
        assert record.plan.forecast_samples_per_s is not None
        check = ForecastCheck(
            record.job.name, record.world_size, record.plan.forecast_samples_per_s, record.samples_per_s
        )
        cluster = cluster.checked(check)
    cluster.save(cluster_file)
