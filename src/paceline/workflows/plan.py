"""`paceline.probe` times real steps of a job; `paceline.plan` forecasts it, or a table of steps, on several devices."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline import env
from paceline.errors import ClusterError, JobError, ModelError, file_problems, shown
from paceline.files import make_run_folder
from paceline.launch.run import LaunchOptions
from paceline.measure.probe import CLUSTER_FILE, save_timing, time_job, trace_job
from paceline.measure.rows import read_rows
from paceline.plan.memory import DeviceMemory, job_memory
from paceline.plan.placement import place, spread, workers_by_node
from paceline.spec import Cluster, Job, Plan, parse_mesh
from paceline.spec.cluster import JobTiming
from paceline.spec.codec import Bounds, PositiveFloat, PositiveInt, UnitInterval
from paceline.spec.forecast import Forecast, Grow
from paceline.spec.plan import PLAN_FILE, check_mesh
from paceline.words import number_of
from paceline.workflows.arguments import Say, checked, read_counts, read_price, silent
from paceline.workflows.jobs import import_folders, resolve_job
from paceline.workflows.where import HERE, Where, open_allocation

if TYPE_CHECKING:
    from paceline.plan.forecast import ForecastRequest, PlanInputs

PAGE_FILE, FORECAST_FILE = "plan.html", "forecast.json"


@checked
def probe(
    job: Job | str | Path,
    *,
    workers: PositiveInt | None = None,
    out: Path | str = CLUSTER_FILE,
    folder: Path | str = Path("runs"),
    budget: Annotated[float, Bounds(low=1)] = 60.0,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
    threads: PositiveInt | None = None,
    where: Where = HERE,
    say: Say = silent,
) -> JobTiming:
    """Time steps of a job on 1, 2, 4, … workers, as a run would make them, and write them into a file.

    On one worker steps with virtual shards of half as many samples are timed too.
    Example: `paceline.probe("digits-lenet", budget=10)`.

    Args:
        workers: the most workers; None: all devices, at most one for each virtual shard.
        out: the file to write; earlier measurements that are not repeated stay in it.
        folder: where files of the workers lie while they are timed, on storage that all nodes see.
        budget: seconds of steps, 1 or more, for all numbers of workers together; starting them comes on top.
        threads: CPU threads that each worker computes with; None: an equal share of the cores.
        job, data, settings, where, say: as for `train`.

    Returns:
        The timed steps of the job.

    Raises:
        ClusterError: the file cannot be read or written.
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed.
    """
    from paceline.plan.forecast import job_step  # NumPy: not for those who only want help

    resolved, file = resolve_job(job, settings, data), Path(out)
    before = Cluster.load(file, "remove it, or name another file with out = FILE") if file.exists() else Cluster(())
    with file_problems(f"{out} cannot be written", ClusterError), tempfile.TemporaryFile(dir=file.parent):
        pass  # known before minutes are spent on what could not be kept
    with file_problems(f"The folder {folder} cannot be used"):
        make_run_folder(Path(folder))
        scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).absolute()
    with open_allocation(where, scratch) as allocation:
        cluster, environ = allocation.cluster, env.python_path(import_folders(resolved))
        most = workers or min(len(cluster.devices), resolved.virtual_shards)
        threads = threads or spread(cluster, most).threads_per_worker
        counts = sorted({*(2**power for power in range(most.bit_length())), most})
        plans = [place(resolved, cluster, count, threads_per_worker=threads) for count in counts]

        def run(plan: Plan, program: Sequence[str], folder: Path) -> None:
            say(f"timing steps on {number_of(plan.world_size, 'worker')} …")
            allocation.run(plan, program, LaunchOptions(folder, environ=environ))

        timing = time_job(resolved, plans, cluster.devices[0].name, scratch, budget, run, job_step)
    shutil.rmtree(scratch, ignore_errors=True)  # it stays where a worker fails, whose report lies there
    with file_problems(f"{out} cannot be written", ClusterError):
        save_timing(timing, cluster.nodes, before, file)
    return timing


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
    efficiency_floor: UnitInterval = 0.5,
    price: str | float | None = None,
    noise_scale: Annotated[float, Bounds(low=1)] | None = None,
    target_samples: PositiveFloat | None = None,
    link_rate: PositiveFloat | None = None,
    devices_per_node: PositiveInt | None = None,
    out: Path | str | None = None,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
    trace: bool = False,
) -> PlannedJob:
    """Forecast step time, throughput, speed-up, time to a target and cost for several device counts; recommend one.

    Example: `paceline.plan("digits-lenet", devices="1..8").forecast.recommended_devices`.

    Args:
        job: what was probed: a job file (TOML), the name of a recipe, or a `Job`; or a table of steps (a CSV file),
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
        trace: trace the model (loads torch), so that pipelines and tensor parallelism are compared too; a model that
            is too large for a device is traced anyway.
        data, settings: as for `train`.

    Raises:
        ClusterError: this hardware was not measured, or no steps of this job on it.
        JobError: an invalid argument, a table with an invalid value, or a job that fits none of the device counts.
        PacelineError: a file cannot be written.
    """
    # NumPy and what plots: not for `paceline --help`.
    from paceline.plan.forecast import ForecastRequest, forecast, plan_inputs

    counts = None if devices is None else read_counts("devices", devices)
    request = ForecastRequest(
        grow, efficiency_floor, *read_price(price), noise_scale, target_samples, link_rate, devices_per_node
    )
    if not isinstance(job, Job) and str(job).endswith((".csv", ".tsv")):
        of_jobs: dict[str, Any] = {"noise_scale": noise_scale, "target_samples": target_samples, "link_rate": link_rate}
        of_jobs |= {"data": data, "settings": settings, "trace": trace, "grow": grow}
        if given := [f"{name} = {shown(value)}" for name, value in of_jobs.items() if value and value != "none"]:
            raise JobError(f"{given[0]} has no effect on the table of steps {job}: leave it out.")
        planned = PlannedJob(_forecast_of_table(Path(job), counts, request), None)
    else:
        resolved = resolve_job(job, settings, data)
        cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(Path(cluster))
        counts = counts or read_counts("devices", f"1..{max(1, len(cluster.devices))}")
        inputs = plan_inputs(resolved, cluster, max(counts), request)
        if trace or not all(map(inputs.has_room, counts)):  # then a pipeline may fit, which needs the layers
            with nullcontext() if trace else suppress(Exception):  # of the user's code, which nobody asked to run
                inputs = inputs.traced(trace_job(resolved))
        found = forecast(inputs, counts)
        planned = PlannedJob(found, _recommended_plan(inputs, found))
    if out is not None:
        with file_problems(f"The plan cannot be written into '{out}'"):
            Path(out).mkdir(parents=True, exist_ok=True)
            planned.forecast.save(Path(out) / FORECAST_FILE)
            (Path(out) / PAGE_FILE).write_text(planned.page(), encoding="utf-8", newline="\n")
            if planned.plan is not None:
                planned.plan.save(Path(out) / PLAN_FILE)
    return planned


def _forecast_of_table(path: Path, counts: Sequence[int] | None, request: ForecastRequest) -> Forecast:
    """The forecast of the rows without a time, and of these device counts with the samples per device of the measured
    row that has the most devices."""
    from paceline.plan.forecast import forecast_of_rows

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


def _recommended_plan(inputs: PlanInputs, forecast: Forecast) -> Plan | None:
    """The plan of the recommended row; None where the cluster has too few devices for it.

    Its workers are laid out on a mesh where replicas do not fit; then it has no forecast that its run would check.
    """
    row, cluster = forecast.recommended, inputs.cluster
    if row.devices > len(cluster.devices):
        return None
    job = inputs.job_on(row.devices)
    if not row.placement:
        plan = place(job, cluster, row.devices, algorithm=row.algorithm if row.devices > 1 else "auto")
        return replace(plan, forecast_samples_per_s=row.samples_per_s)
    from paceline.plan.meshes import search

    best = search(inputs.workload(row.devices))[0]
    return replace(place(job, cluster, row.devices, mesh=best.mesh), recompute=best.recompute)


@checked
def dry_run_mesh(
    job: Job | str | Path,
    mesh: str,
    *,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
) -> DeviceMemory:
    """What the fullest worker of a mesh would hold, computed without its devices; with the stages of a pipeline.

    Example: `paceline.dry_run_mesh("digits-lenet", "dp4 x pp2").total_bytes`.

    Args:
        mesh: such as "dp128 x tp8".
        job, data, settings: as for `train`.

    Raises:
        JobError: not a mesh, or one that cannot train the job, as with more replicas than virtual shards.
        ModelError: the model cannot be cut into these stages, or its layers not be divided so.
    """
    axes, resolved = parse_mesh(mesh), resolve_job(job, settings, data)
    check_mesh(resolved.with_values(parity="numeric"), axes)  # bits are no question of memory
    cost = trace_job(resolved)
    if axes.tp > 1 and not any(layer.tensor_shards(axes.tp) > 1 for layer in cost.layers):
        raise ModelError(f"The model has no tensor plan by which {axes.tp} workers could divide a layer; leave tp out.")
    return job_memory(resolved, cost, axes)
