"""`paceline.plan`: forecasts a job, or a table of steps, on 1, 2, … N devices and recommends a number.

A run's plan has the forecast too, and its error goes into cluster.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ClusterError, JobError, file_problems, reason_of, shown
from paceline.plan import place
from paceline.spec import Cluster, Job, Plan, RunRecord
from paceline.spec.cluster import ForecastCheck
from paceline.spec.forecast import Forecast, Grow
from paceline.spec.plan import PLAN_FILE
from paceline.workflows.arguments import Say, checked, read_counts, read_price
from paceline.workflows.jobs import resolve_job, trace_model
from paceline.workflows.step_rows import read_rows

if TYPE_CHECKING:
    from paceline.plan.inputs import ForecastRequest
    from paceline.spec.model_cost import ModelCost

CLUSTER_FILE = Path("cluster.json")
PAGE_FILE, FORECAST_FILE = "plan.html", "forecast.json"


@dataclass(frozen=True)
class PlannedJob:
    """A forecast, and the plan of its recommended row; None for a table of steps, and where the cluster has too few
    devices for that row."""

    forecast: Forecast
    plan: Plan | None

    def page(self) -> str:
        """The HTML page: the table, with plots of the forecast and its uncertainty."""
        from paceline.report.plan_page import plan_page

        return plan_page(self.forecast)

    def _repr_html_(self) -> str:
        from paceline.report.plan_page import plan_table
        from paceline.report.tables import html_of

        return html_of(plan_table(self.forecast))


@checked
def plan(
    job: Job | str | Path,
    *,
    cluster: Cluster | Path | str = CLUSTER_FILE,
    devices: Sequence[int] | str | None = None,
    grow: Grow = "none",
    efficiency_floor: float = 0.5,
    price: str | float | None = None,
    noise_scale: float | None = None,
    target_samples: float | None = None,
    link_rate: float | None = None,
    devices_per_node: int | None = None,
    out: Path | str | None = None,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
    trace: bool = False,
) -> PlannedJob:
    """Forecast step time, throughput, speed-up, time to a target and cost for several device counts; recommend one.

    Example: `paceline.plan("digits-lenet", devices="1..8").forecast.recommended_devices`.

    Args:
        job: a job that was probed: a job, a job file (TOML) or the name of a recipe; or a table of steps (a CSV file),
            whose columns are num_nodes, devices_per_node (or devices_on_node, "2+4"), micro_batch_size, step_time_s; if
            known also grad_accum_steps or global_batch_size, sync_time_s, algorithm, gradient_bytes, link_bytes_per_s.
            Rows without a step_time_s are forecast.
        cluster: the cluster that `probe` measured, or its file.
        devices: the device counts: numbers, or a text such as "1..64" or "1,2,4"; None: up to all of the cluster, or of
            a table its rows without a time, else up to twice the most devices that were measured.
        grow: "none": the same global batch on every count; "batch": the same batch for each device.
        efficiency_floor: least scaling efficiency worth recommending, in [0, 1].
        price: price of one device per hour, such as 2.5 or "2.5 USD".
        noise_scale: the gradient noise scale in samples, as training logs it.
        target_samples: number of samples that the unchanged job needs to reach its target.
        link_rate: bytes per second between nodes in one direction where no step was timed on several nodes, such as
            1.25e9 (10 Gbit/s); taken as a bound.
        devices_per_node: devices on each node beyond the measured ones; None: as on the largest node.
        out: the folder for plan.json, plan.html and forecast.json; None: nothing is written.
        trace: trace the model, so that pipeline and tensor parallelism are considered too.
        model, data, settings: as for `train`.

    Raises:
        ClusterError: this hardware was not measured, or no steps of this job on it.
        JobError: an invalid argument, a table with an invalid value, or a job that fits none of the device counts.
        PacelineError: a file cannot be written.
    """
    # NumPy and what plots: not for `paceline --help`.
    from paceline.plan.forecast import forecast
    from paceline.plan.inputs import ForecastRequest

    amount, currency = read_price(price)
    counts = None if devices is None else read_counts("devices", devices)
    request = ForecastRequest(
        grow=grow,
        efficiency_floor=efficiency_floor,
        price_per_device_hour=amount,
        currency=currency,
        noise_scale=noise_scale,
        target_samples=target_samples,
        link_bytes_per_s=link_rate,
        devices_per_node=devices_per_node,
    )
    if not isinstance(job, Job) and str(job).endswith((".csv", ".tsv")):
        of_jobs: dict[str, Any] = {
            "noise_scale": noise_scale,
            "target_samples": target_samples,
            "link_rate": link_rate,
            "model": model,
        }
        of_jobs |= {"data": data, "settings": settings, "trace": trace, "grow": grow != "none"}
        if given := [f"{name} = {shown(value)}" for name, value in of_jobs.items() if value]:
            raise JobError(f"{given[0]} has no effect on the table of steps {job}: leave it out.")
        planned = PlannedJob(_forecast_of_table(Path(job), counts, request), None)
    else:
        resolved = resolve_job(job, settings, data, model)
        if not isinstance(cluster, Cluster):
            if not Path(cluster).exists():
                name = resolved.name if isinstance(job, Job) else job
                raise ClusterError(f"There is no {cluster}: run paceline probe {name} first.")
            cluster = Cluster.load(Path(cluster))
        counts = counts or read_counts("devices", f"1..{max(1, len(cluster.devices))}")
        model_cost = trace_model(resolved) if trace else None
        found = forecast(resolved, cluster, counts, request, model_cost)
        planned = PlannedJob(found, _recommended_plan(resolved, cluster, found, request, model_cost))
    if out is not None:
        with file_problems(f"The plan cannot be written into '{out}'"):
            Path(out).mkdir(parents=True, exist_ok=True)
            planned.forecast.save(Path(out) / FORECAST_FILE)
            (Path(out) / PAGE_FILE).write_text(planned.page(), encoding="utf-8", newline="\n")
            if planned.plan is not None:
                planned.plan.save(Path(out) / PLAN_FILE)
    return planned


def _forecast_of_table(path: Path, counts: Sequence[int] | None, request: ForecastRequest) -> Forecast:
    """The forecast of the rows without a time, and of device counts with as many samples a device as the measured row
    with the most devices has."""
    from paceline.plan.forecast import forecast_of_rows
    from paceline.plan.inputs import workers_by_node

    rows = read_rows(path)
    measured = [row for row in rows if row.step_time_s is not None]
    asked = [row for row in rows if row.step_time_s is None]
    largest = max(measured, key=lambda row: row.num_workers)
    if counts is None and not asked:
        counts = read_counts("devices", f"1..{2 * largest.num_workers}")
    on_node = request.devices_per_node or max(row.most_on_node for row in rows)
    for count in counts or ():
        asked.append(replace(largest.unmeasured(), workers_per_node=workers_by_node(count, (), on_node)))
    return forecast_of_rows(path.stem, measured, list(dict.fromkeys(asked)), request)


def _recommended_plan(
    job: Job, cluster: Cluster, forecast: Forecast, request: ForecastRequest, model: ModelCost | None
) -> Plan | None:
    """The plan of the recommended row; None where the cluster has too few devices for it.

    Its workers are laid out on a mesh where replicas do not fit; then it has no forecast that its run would check.
    """
    row = forecast.recommended
    if row.devices > len(cluster.devices):
        return None
    grown = job.grown(row.devices) if forecast.grow == "batch" else job
    if not row.placement:
        plan = place(grown, cluster, row.devices, algorithm=row.algorithm if row.devices > 1 else "auto")
        return replace(plan, forecast_samples_per_s=row.samples_per_s)
    from paceline.plan.inputs import plan_inputs
    from paceline.plan.meshes import search_meshes

    best = search_meshes(plan_inputs(job, cluster, request, row.devices, model), row.devices)[0]
    return replace(place(grown, cluster, row.devices, mesh=best.mesh), recompute=best.recompute)


def with_forecast(job: Job, plan: Plan, say: Say) -> Plan:
    """The plan with its forecast; unchanged if this job was not probed, and for a mesh, since the steps of a probe are
    those of whole replicas.

    Raises:
        ClusterError: there is a file, but it cannot be read.
    """
    cluster = Cluster.load(CLUSTER_FILE) if CLUSTER_FILE.exists() else Cluster(())
    is_meshed = plan.mesh is not None and not plan.mesh.is_plain
    if is_meshed or all(timing.job != job.name for timing in cluster.timings):
        return plan
    from paceline.plan.forecast import forecast  # NumPy: not for those who have not probed

    try:
        row = forecast(job, cluster, sorted({1, plan.world_size})).rows[-1]
    except (ClusterError, JobError) as problem:  # the job has changed since it was probed, or a link was not measured
        say(f"paceline: no forecast: {problem}")
        return plan
    return replace(plan, forecast_samples_per_s=None if row.objection or row.placement else row.samples_per_s)


def feed_back(record: RunRecord) -> None:
    """Write the error of this run's forecast, if it had one, to cluster.json in the working directory."""
    forecast = record.plan.forecast_samples_per_s
    if not forecast:
        return
    try:
        check = ForecastCheck(record.job.name, record.world_size, forecast, record.samples_per_s)
        Cluster.load(CLUSTER_FILE).checked(check).save(CLUSTER_FILE)
    except (OSError, ClusterError) as problem:  # the run is good nevertheless
        print(f"paceline: no forecast error noted in {CLUSTER_FILE}: {reason_of(problem)}", file=sys.stderr)
