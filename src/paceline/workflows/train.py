"""`paceline.train`: one run of a job, on this node or on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import env
from paceline.launch.run import LaunchOptions
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.job import CallbackSpec, TrackerName
from paceline.spec.plan import RunLimit
from paceline.workflows.arguments import Say, checked, silent
from paceline.workflows.jobs import check_names, import_folders, resolve_job, with_callbacks
from paceline.workflows.plan import feed_back, with_forecast
from paceline.workflows.run_folder import (
    finished_record,
    finished_run,
    new_run_dir,
    put_record_aside,
    training_program,
    write_run,
)
from paceline.workflows.strategy import place_run, split_settings
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
    track: Sequence[TrackerName] = (),
    quiet: bool = True,
    where: Where = HERE,
    max_restarts: int = 0,
    strategy: str | None = None,
    plan: Plan | Path | str | None = None,
    say: Say = silent,
) -> RunRecord:
    """Train a job in worker processes and return the record of the run.

    A forecast beside the measurement comes from the cluster.json that `probe` wrote into this folder.
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
        settings: keys of the job to change, such as "optim.lr=0.1", and of the plan, such as "plan.algorithm=ring".
        track: also log to "tensorboard", "wandb" or "mlflow".
        quiet: whether workers leave out their progress, which goes to standard error.
        where: the nodes, and how they are reached.
        max_restarts: how often all workers are started again after a failure, from the newest checkpoint.
        strategy: how workers divide the model: dp, fsdp, zero1, zero2, hsdp, pp, tp, dp_one_process, a mesh such as
            "dp2 x pp2", or auto: the planner chooses; None: as `plan` says, else dp.
        plan: the plan that `plan` recommended, or its file; arguments given here override it.
        say: receives the planner's choices, one line at a time.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed; its message names the rank and the reason.
    """
    of_job, of_plan = split_settings(settings)
    resolved = with_callbacks(resolve_job(job, of_job, data, model), callbacks)
    limit = RunLimit.from_mapping({"max_steps": max_steps, "max_minutes": max_minutes})
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan))
    run_dir = new_run_dir(out, resolved.name)
    if record := finished_run(run_dir, resolved, max_steps, force=force):
        say(f"{run_dir} holds this run, finished; this is its result")
        return record
    with open_allocation(where, run_dir) as allocation:
        put_record_aside(run_dir)
        placed = _plan_on(allocation, resolved, workers, strategy, of_plan, given, say)
        options = {"quiet": quiet, "trackers": track, "force": force}
        return run_job(allocation, resolved, placed, run_dir, limit, max_restarts=max_restarts, **options)


def run_job(
    allocation: Allocation,
    job: Job,
    plan: Plan,
    run_dir: Path,
    limit: RunLimit,
    *,
    max_restarts: int = 0,
    **writing: Any,
) -> RunRecord:
    """Train a job by its plan, and note the error of its forecast; `writing` are options of `write_run`.

    Raises:
        WorkerFailed: a worker failed; its message names the rank and the reason.
    """
    started, program = time.monotonic(), write_run(job, plan, run_dir, limit, **writing)
    environ = env.import_note(import_folders(job))
    allocation.run(plan, program, LaunchOptions(run_dir, max_restarts=max_restarts, environ=environ))
    record = finished_record(run_dir, started, was_elsewhere=allocation.is_elsewhere)
    feed_back(record)
    return record


def train_commands(
    job: Job | str | Path,
    *,
    workers: int | None = None,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
    out: Path | str | None = None,
    force: bool = False,
    track: Sequence[str] = (),
    quiet: bool = True,
    where: Where = HERE,
    max_restarts: int = 0,
    strategy: str | None = None,
    plan: Path | str | None = None,
    say: Say = silent,
    **_limits: Any,
) -> str:
    """The commands that `train` would start, with the same arguments; starts nothing and opens no connection."""
    of_job, of_plan = split_settings(settings)
    resolved = resolve_job(job, of_job, data)
    check_names(resolved)
    run_dir = Path(out or f"runs/{resolved.name}").absolute()
    allocation = allocation_on_paper(where, run_dir)
    given = None if plan is None else Plan.load(Path(plan))
    placed = _plan_on(allocation, resolved, workers, strategy, of_plan, given, say)
    program, options = training_program(run_dir, quiet, track, force), LaunchOptions(run_dir, max_restarts=max_restarts)
    return allocation.commands(placed, program, options)


def _plan_on(
    allocation: Allocation,
    job: Job,
    workers: int | None,
    strategy: str | None,
    settings: Sequence[str],
    given: Plan | None,
    say: Say,
) -> Plan:
    """The plan of the run on these nodes: of as many workers as are asked for, or as plan, nodes and job allow."""
    num_devices = len(allocation.cluster.devices)
    num_workers = workers or (given.world_size if given else min(num_devices, job.virtual_shards))
    placed = place_run(job, allocation.cluster, num_workers, strategy, settings, given, say)
    return with_forecast(job, placed, say)
