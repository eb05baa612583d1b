"""`paceline.train`: one run of a job, on this node or on several."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import JobError, shortened
from paceline.launch.run import LaunchOptions
from paceline.spec import AlgorithmName, Job, Plan, RunRecord
from paceline.spec.job import TRACKER_NAMES, CallbackSpec
from paceline.spec.plan import RunLimit
from paceline.workflows.arguments import Say, checked, silent
from paceline.workflows.jobs import check_names, import_folders, resolve_job, with_callbacks
from paceline.workflows.plan import CLUSTER_FILE, feed_back, with_forecast
from paceline.workflows.run_folder import (
    check_folder,
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
    track: Sequence[str] = (),
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
    training = _Training(
        with_callbacks(resolve_job(job, settings, data, model), callbacks),
        workers=workers,
        max_steps=max_steps,
        max_minutes=max_minutes,
        force=force,
        threads=threads,
        algorithm=algorithm,
        servers=servers,
        track=track,
        quiet=quiet,
        strategy=Strategy(strategy) if isinstance(strategy, str) else strategy,
        debug_comm=debug_comm,
        cluster=Path(cluster),
        plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan)),
        say=say,
    )
    run_dir = new_run_dir(out, training.job.name)
    if record := training.finished(run_dir):
        return record
    with open_allocation(where, run_dir) as allocation:
        if record := training.finished(run_dir):  # by another run, which held the folder until now
            return record
        put_record_aside(run_dir)
        started = time.monotonic()
        placed = training.plan_for(allocation)
        environ = env.import_note(import_folders(training.job))
        options = LaunchOptions(run_dir, max_restarts=max_restarts, environ=environ)
        allocation.run(placed, training.write(placed, run_dir), options)
        record = finished_record(run_dir, started, was_elsewhere=allocation.is_elsewhere)
    feed_back(record, Path(cluster))
    return record


@dataclass(frozen=True)
class _Training:
    """A job, and the arguments of `train` that say how far it is trained, and how it is spread over workers."""

    job: Job
    workers: int | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    force: bool = False
    threads: int | None = None
    algorithm: AlgorithmName = "auto"
    servers: int = 1
    track: Sequence[str] = ()
    quiet: bool = True
    strategy: Strategy = PLAIN
    debug_comm: bool = False
    cluster: Path = CLUSTER_FILE
    plan: Plan | None = None
    say: Say = silent

    def __post_init__(self) -> None:
        RunLimit.from_mapping({"max_minutes": self.max_minutes})
        for name in self.track:
            if name not in TRACKER_NAMES:
                raise JobError(f"There is no tracker '{shortened(name)}'; it is one of {', '.join(TRACKER_NAMES)}.")
        is_served = self.job.aggregation.method == "parameter_server_async"
        if self.servers > 1 and not is_served and not self.chosen_algorithm.startswith("parameter_server"):
            raise JobError(
                f"servers = {self.servers} goes with algorithm = 'parameter_server' or 'parameter_server_two_level', "
                "or a job's aggregation.method = 'parameter_server_async'; leave it out."
            )

    @property
    def chosen_algorithm(self) -> AlgorithmName:
        """The algorithm that is asked for, or else the plan's."""
        return self.plan.algorithm if self.plan and self.algorithm == "auto" else self.algorithm

    def finished(self, run_dir: Path) -> RunRecord | None:
        """The record of the run in `run_dir` if nothing is left to do of it; raises as `finished_run`."""
        record = finished_run(run_dir, self.job, self.max_steps, force=self.force)
        if record is not None:
            self.say(f"{run_dir} holds this run, finished; this is its result")
        return record

    def write(self, plan: Plan, run_dir: Path) -> list[str]:
        """Write the run into its folder; returns the program of its workers."""
        limit = RunLimit(self.max_steps, self.max_minutes)
        return write_run(self.job, plan, run_dir, limit, quiet=self.quiet, trackers=self.track, force=self.force)

    def num_workers_on(self, allocation: Allocation) -> int:
        """The number of workers that is asked for, or what the plan, the nodes and the job allow."""
        num_devices = 1 if allocation.where.launcher == "debug" else len(allocation.cluster.devices)
        planned = self.plan.world_size if self.plan else min(num_devices, self.job.virtual_shards)
        return planned if self.workers is None else self.workers

    def plan_for(self, allocation: Allocation) -> Plan:
        """The plan of the run on these nodes."""
        plan = self.strategy.placed(
            self.job,
            allocation.cluster,
            self.num_workers_on(allocation),
            self.plan,
            self.say,
            threads_per_worker=self.threads,
            algorithm=self.chosen_algorithm,
            num_servers=self.servers,
        )
        plan = dataclasses.replace(plan, debug_comm=self.debug_comm)
        return with_forecast(self.job, plan, self.cluster, self.say)


def train_commands(
    job: Job | str | Path,
    *,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
    out: Path | None = None,
    where: Where = HERE,
    plan: Path | None = None,
    max_restarts: int = 0,
    **options: Any,
) -> str:
    """The commands that `train` would start, with the same arguments; starts nothing and opens no connection."""
    training = _Training(resolve_job(job, settings, data), plan=None if plan is None else Plan.load(plan), **options)
    check_names(training.job)
    if out is not None:
        check_folder(out)
        finished_run(out, training.job, training.max_steps, force=training.force)
    run_dir = (out or Path("runs") / training.job.name).absolute()
    program = training_program(run_dir, training.quiet, training.track, training.force)
    allocation = allocation_on_paper(where, run_dir)
    placed = training.plan_for(allocation)
    return allocation.commands(placed, program, LaunchOptions(run_dir, max_restarts=max_restarts))
