"""`paceline.train`: one run of a job, on this node or on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import JobError
from paceline.launch.run import LaunchOptions
from paceline.spec import AlgorithmName, Job, Plan, RunRecord
from paceline.spec.job import CallbackSpec, TrackerName
from paceline.spec.plan import RunLimit
from paceline.workflows.arguments import Say, checked, silent
from paceline.workflows.jobs import check_names, import_folders, resolve_job, with_callbacks
from paceline.workflows.plan import CLUSTER_FILE, feed_back, with_forecast
from paceline.workflows.run_folder import (
    finished_record,
    finished_run,
    new_run_dir,
    put_record_aside,
    training_program,
    write_run,
)
from paceline.workflows.strategy import PLAIN, Strategy
from paceline.workflows.where import HERE, Allocation, Where, allocation_on_paper, open_allocation


@checked
def train(
    job: Job | str | Path,
    *,
    workers: int | None = None,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    callbacks: Sequence[CallbackSpec | type | str | tuple[type | str, Mapping[str, Any]]] = (),
    out: Path | str | None = None,
    force: bool = False,
    settings: Sequence[str] = (),
    threads: int | None = None,
    algorithm: AlgorithmName = "auto",
    servers: int = 1,
    track: Sequence[TrackerName] = (),
    quiet: bool = True,
    where: Where = HERE,
    max_restarts: int = 0,
    strategy: Strategy | str = PLAIN,
    debug_comm: bool = False,
    cluster: Path | str = CLUSTER_FILE,
    plan: Plan | Path | str | None = None,
    say: Say = silent,
) -> RunRecord:
    """Train a job in worker processes and return the record of the run.

    Example: `record = paceline.train("mnist-lenet", workers=2)`.

    Args:
        job: a job, a job file (TOML) or the name of a recipe.
        workers: number of workers; None: one for each device, but not more than the job has virtual shards.
        model: a model by name, or a function or class in a module, which builds one; None: the job's.
        data: the directory of the job's data set, or a function in a module that builds (train_set, test_set).
        max_steps: end after this many optimizer updates.
        max_minutes: save and end this many minutes after the launch; the same call with the same `out` resumes the run.
        callbacks: further callbacks, called after the job's own: subclasses of `paceline.Callback` in a module, their
            import paths, or pairs of either and a mapping of options.
        out: the run's folder; None: a new one under runs/. An interrupted run in it is resumed; a finished one
            returns its record, or continues if more epochs or steps are asked for.
        force: resume even from a checkpoint of another job.
        settings: keys of the job to change, such as "optim.lr=0.1".
        threads: CPU threads that each worker computes with; None: an equal share of the cores.
        algorithm: how gradients are summed; "auto": the fastest, by measurement at the start.
        servers: workers that also serve, with parameter servers.
        track: also log to "tensorboard", "wandb" or "mlflow".
        quiet: whether workers leave out their progress, which goes to standard error.
        where: the nodes, and how they are reached.
        max_restarts: how often all workers are started again after a failure, from the newest checkpoint.
        strategy: how workers divide the model, such as "fsdp" or "dp2 x pp2".
        debug_comm: compare every collective across workers, and turn on NCCL's debug output.
        cluster: the file of `probe`'s measurements, for a forecast beside the measurement; need not exist.
        plan: the plan that `plan` recommended, or its file; arguments given here override it.
        say: receives the planner's choices, one line at a time.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed; its message names the rank and the reason.
    """
    resolved = with_callbacks(resolve_job(job, settings, data, model), callbacks)
    limit = RunLimit.from_mapping({"max_steps": max_steps, "max_minutes": max_minutes})
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan))
    run_dir = new_run_dir(out, resolved.name)
    if record := finished_run(run_dir, resolved, max_steps, force=force):
        say(f"{run_dir} holds this run, finished; this is its result")
        return record
    with open_allocation(where, run_dir) as allocation:
        put_record_aside(run_dir)
        started = time.monotonic()
        placed = _plan_on(
            allocation,
            resolved,
            workers=workers,
            threads=threads,
            algorithm=algorithm,
            servers=servers,
            strategy=strategy,
            debug_comm=debug_comm,
            cluster=cluster,
            plan=given,
            say=say,
        )
        program = write_run(resolved, placed, run_dir, limit, quiet=quiet, trackers=track, force=force)
        imports = env.import_note(import_folders(resolved))
        allocation.run(placed, program, LaunchOptions(run_dir, max_restarts=max_restarts, environ=imports))
        record = finished_record(run_dir, started, was_elsewhere=allocation.is_elsewhere)
    feed_back(record, Path(cluster))
    return record


def train_commands(
    job: Job | str | Path,
    *,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
    max_steps: int | None = None,
    max_minutes: float | None = None,
    out: Path | str | None = None,
    force: bool = False,
    track: Sequence[str] = (),
    quiet: bool = True,
    where: Where = HERE,
    max_restarts: int = 0,
    **spread: Any,
) -> str:
    """The commands that `train` would start, with the same arguments; starts nothing and opens no connection."""
    resolved = resolve_job(job, settings, data)
    check_names(resolved)
    RunLimit.from_mapping({"max_steps": max_steps, "max_minutes": max_minutes})
    run_dir = Path(out or f"runs/{resolved.name}").absolute()
    finished_run(run_dir, resolved, max_steps, force=force)
    allocation = allocation_on_paper(where, run_dir)
    program, options = training_program(run_dir, quiet, track, force), LaunchOptions(run_dir, max_restarts=max_restarts)
    return allocation.commands(_plan_on(allocation, resolved, **spread), program, options)


def _plan_on(
    allocation: Allocation,
    job: Job,
    *,
    workers: int | None = None,
    threads: int | None = None,
    algorithm: AlgorithmName = "auto",
    servers: int = 1,
    strategy: Strategy | str = PLAIN,
    debug_comm: bool = False,
    cluster: Path | str = CLUSTER_FILE,
    plan: Plan | Path | str | None = None,
    say: Say = silent,
) -> Plan:
    """The plan of the run on these nodes: of as many workers as are asked for, or as plan, nodes and job allow."""
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan))
    strategy = Strategy(strategy) if isinstance(strategy, str) else strategy
    algorithm = given.algorithm if given and algorithm == "auto" else algorithm
    is_served = job.aggregation.method == "parameter_server_async" or algorithm.startswith("parameter_server")
    if servers > 1 and not is_served:
        raise JobError(
            f"servers = {servers} goes with algorithm = 'parameter_server' or 'parameter_server_two_level', or a job's "
            "aggregation.method = 'parameter_server_async'; leave it out."
        )
    num_devices = 1 if allocation.where.started_by == "debug" else len(allocation.cluster.devices)
    num_workers = workers or (given.world_size if given else min(num_devices, job.virtual_shards))
    options = {"threads_per_worker": threads, "algorithm": algorithm, "num_servers": servers}
    placed = strategy.placed(job, allocation.cluster, num_workers, given, say, **options)
    return with_forecast(job, replace(placed, debug_comm=debug_comm), Path(cluster), say)
