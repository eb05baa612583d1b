"""From a job or a script to its workers and their runs, one or several side by side.

`paceline.train`, `launch`, `scale`, `report` and `watch`; and the folder of a run.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import env
from paceline.errors import ClusterError, JobError, LaunchError, PacelineError, WorkerFailed, file_problems
from paceline.files import RUN_LOCK, make_run_folder, run_file_mode
from paceline.launch.run import LaunchOptions
from paceline.measure.probe import CLUSTER_FILE, note_forecast_error
from paceline.plan.placement import spread
from paceline.spec import Cluster, Job, Plan, RunRecord, parse_mesh
from paceline.spec.codec import NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval
from paceline.spec.forecast import Grow
from paceline.spec.job import JOB_FILE, TrackerName, differences
from paceline.spec.plan import LIMIT_FILE, PLAN_FILE, RunLimit
from paceline.spec.record import RECORD_FILE
from paceline.words import number_of
from paceline.workflows.arguments import Say, checked, read_counts, silent
from paceline.workflows.jobs import CallbackLike, import_folders, plan_run, resolve_job, with_callbacks
from paceline.workflows.where import HERE, Allocation, Where, open_allocation

if TYPE_CHECKING:
    from paceline.report.study import Study

STALE_VIEW_S = 60.0
"""For at most this long a node takes the old content of a shared file for the present one, or believes it absent."""
_MOST_NAME_CHARACTERS = 50
"""What a folder's name keeps of its job's: 200 bytes at most in UTF-8, and file systems take 255."""


@checked
def train(
    job: Job | str | Path,
    *,
    workers: PositiveInt | None = None,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    max_steps: PositiveInt | None = None,
    max_minutes: PositiveFloat | None = None,
    callbacks: Sequence[CallbackLike] = (),
    out: Path | str | None = None,
    force: bool = False,
    settings: Sequence[str] = (),
    track: Sequence[TrackerName] = (),
    quiet: bool = True,
    where: Where = HERE,
    max_restarts: NonNegativeInt = 0,
    strategy: str | None = None,
    plan: Plan | Path | str | None = None,
    say: Say = silent,
) -> RunRecord:
    """Train a job in worker processes and return the record of the run.

    A forecast beside the measurement comes from the cluster.json that `probe` wrote into this folder.
    Example: `record = paceline.train("mnist-lenet", workers=2)`.

    Args:
        job: a job file (TOML), the name of a recipe, or a `Job`.
        workers: number of workers; None: one for each device, but not more than the job has virtual shards.
        model: a model by name, or a function or class in a module, which builds one; None: the job's.
        data: the directory of the job's data set, or a function in a module that builds (train_set, test_set).
        max_steps: end after this many optimizer updates.
        max_minutes: save and end this many minutes after the launch; the same call, into the same folder, goes on.
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
        plan: a file with a plan, such as plan.json, or a `Plan`, in place of a strategy; settings change it.
        say: receives the planner's choices, one line at a time.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed; its message names the rank and the reason.
    """
    resolved = with_callbacks(resolve_job(job, settings, data, model, is_run=True), callbacks)
    limit = RunLimit(max_steps, max_minutes)
    run_dir = new_run_dir(out, resolved.name)
    if record := finished_run(run_dir, resolved, max_steps, force=force):
        say(f"{run_dir} holds this run, finished; this is its result")
        return record
    given = Plan.load(Path(plan)) if isinstance(plan, Path | str) else plan
    with open_allocation(where, run_dir) as allocation:
        cluster = allocation.cluster
        num_workers = workers or (given.world_size if given else min(len(cluster.devices), resolved.virtual_shards))
        placed = with_forecast(resolved, plan_run(resolved, cluster, num_workers, strategy, settings, given, say), say)
        return run_job(
            allocation, resolved, placed, run_dir, limit, max_restarts, quiet=quiet, track=track, force=force
        )


def run_job(
    allocation: Allocation, job: Job, plan: Plan, run_dir: Path, limit: RunLimit, max_restarts: int = 0, **writing: Any
) -> RunRecord:
    """Train a job by its plan; its record, with the whole time, and the error of its forecast noted. It raises what
    `train` does. `writing` are options of `write_run`. The caller holds the folder."""
    started, file = time.monotonic(), run_dir / RECORD_FILE
    if file.exists():  # of a finished run, of which more is wanted
        file.rename(run_dir / f"record-{RunRecord.load(file).steps}-steps.json")
    program = write_run(job, plan, run_dir, limit, **writing)
    environ = env.python_path(import_folders(job))
    allocation.run(plan, program, LaunchOptions(run_dir, max_restarts=max_restarts, environ=environ))
    wall_s = time.monotonic() - started  # only here is known when the last worker ended
    has_nodes_elsewhere = any(node.is_remote for node in allocation.cluster.nodes)
    while has_nodes_elsewhere and not file.exists() and time.monotonic() < started + wall_s + STALE_VIEW_S:
        time.sleep(0.1)
    record = replace(RunRecord.load(file), wall_s=wall_s)
    with contextlib.suppress(OSError):  # the worker's own record is there
        record.save(file, run_file_mode())
    note_forecast_error(record)
    return record


def with_forecast(job: Job, plan: Plan, say: Say) -> Plan:
    """The plan with its forecast; unchanged if this job was not probed, and for a mesh, since the steps of a probe are
    those of whole replicas. Raises `ClusterError` for a cluster.json that cannot be read."""
    cluster = Cluster.load(CLUSTER_FILE) if CLUSTER_FILE.exists() else Cluster(())
    is_meshed = plan.mesh is not None and not plan.mesh.is_plain
    if is_meshed or all(timing.job != job.name for timing in cluster.timings):
        return plan
    from paceline.plan.forecast import forecast, plan_inputs  # NumPy: not for those who have not probed

    try:
        row = forecast(plan_inputs(job, cluster, plan.world_size), sorted({1, plan.world_size})).rows[-1]
    except (ClusterError, JobError) as problem:  # the job has changed since it was probed, or a link was not measured
        say(f"paceline: no forecast: {problem}")
        return plan
    return replace(plan, forecast_samples_per_s=None if row.objection or row.placement else row.samples_per_s)


def new_run_dir(out: Path | str | None, name: str) -> Path:
    """The folder of a run: `out`, or a fresh one under runs/, which goes again at this process's end if nothing was
    begun in it. Raises `PacelineError` where none can be made there."""
    if out:
        return Path(out)
    # Whatever a job is called, its folder lies below runs/, and its name is one that file systems take.
    safe = re.sub(r"[^\w.+=@ -]", "-", name)[:_MOST_NAME_CHARACTERS].strip(". ") or "run"
    stem = f"{safe}-{datetime.now():%Y%m%d-%H%M%S}"
    with file_problems("No run folder can be made under runs", remedy="name another one with out = DIR"):
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):
            run_dir = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir(mode=0o700)
                atexit.register(_remove_if_unused, run_dir.absolute())
                break
        return run_dir


def _remove_if_unused(run_dir: Path) -> None:
    if {file.name for file in run_dir.glob("*")} <= {RUN_LOCK}:  # what was asked for was refused
        shutil.rmtree(run_dir, ignore_errors=True)


def finished_run(run_dir: Path, job: Job, max_steps: int | None, *, force: bool = False) -> RunRecord | None:
    """The record of the run in `run_dir` if nothing is left to do of `job`; None if there is.
    Raises `PacelineError` for a finished run of another job, or of more epochs or steps."""
    if not (run_dir / RECORD_FILE).exists():
        return None
    held, remedy = f"{run_dir} already holds a finished run", "name another folder, or remove the folder"
    record = RunRecord.load(run_dir / RECORD_FILE, remedy)
    before = record.job
    changes = differences(before.to_mapping(), replace(job, epochs=before.epochs).to_mapping())
    if changes and not force:
        raise PacelineError(f"{held} of another job ({'; '.join(changes)}); {remedy}.")
    if job.epochs < before.epochs or (max_steps is not None and max_steps < record.steps):
        length = f"{number_of(record.steps, 'step')} and {number_of(before.epochs, 'epoch')}"
        raise PacelineError(f"{held} that is longer, of {length}; {remedy}.")
    limit = RunLimit.load(file, remedy) if (file := run_dir / LIMIT_FILE).exists() else RunLimit()
    had = (before.epochs, limit.max_steps, before.early_stopping)
    is_same = not changes and had == (job.epochs, max_steps, job.early_stopping)
    return record if is_same and record.is_complete else None


def write_run(
    job: Job,
    plan: Plan,
    run_dir: Path,
    limit: RunLimit | None = None,
    *,
    quiet: bool = True,
    track: Sequence[str] = (),
    force: bool = False,
) -> list[str]:
    """Write job, plan and limit into the run folder; the program that trains them, as python's arguments."""
    values = {JOB_FILE: job, PLAN_FILE: plan, LIMIT_FILE: limit or RunLimit()}
    with file_problems(f"The run folder {run_dir} cannot be written to", remedy="name another one with out = DIR"):
        make_run_folder(run_dir)  # that only its owner can read
        for name, value in values.items():
            value.save(run_dir / name, run_file_mode())
    # Absolute: on another node the working directory may be another.
    program = ["-m", "paceline.train", str(run_dir.absolute()), *["--quiet"] * quiet, *["--force"] * force]
    return program + [word for tracker in track for word in ("--track", tracker)]


@checked
def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: PositiveInt | None = None,
    out: Path | str | None = None,
    threads: PositiveInt | None = None,
    strategy: str | None = None,
    module: bool = False,
    where: Where = HERE,
    max_restarts: NonNegativeInt = 0,
    debug_comm: bool = False,
    torchrun: Sequence[str] = (),
    dry_run: bool = False,
) -> Path:
    """Run a script on several workers and return the folder of its logs.

    The script calls `paceline.init`, or knows nothing of Paceline and calls `torch.distributed.init_process_group` or a
    library that does: its workers find the variables that torchrun sets.

    Example: `paceline.launch("train.py", ["--epochs", "3"], workers=2)`.

    Args:
        script: a Python script, for torchrun or `paceline.init`; `arguments` follow it.
        workers: number of workers; None: one for each device.
        out: the folder for logs; None: a new one under runs/.
        threads: CPU threads that each worker computes with; None: an equal share of the cores.
        strategy: how workers divide the model if the script does not choose it, such as "fsdp" or "dp2 x pp2".
        module: run `script` as a module, as `python -m` does.
        max_restarts: how often all workers are started again after a failure; the script must resume by itself.
        debug_comm: compare every collective across workers, and turn on NCCL's debug output.
        torchrun: further arguments of torchrun, each as one word, such as --rdzv-conf=timeout=60.
        dry_run: print what would be started, and start nothing.
        where: as for `train`.

    Raises:
        LaunchError: there is no such script, or workers cannot be started.
        JobError: a strategy that does not make as many workers, or arguments that are no list of texts.
        WorkerFailed: a worker failed; says which rank, and why.
    """
    script = str(script)
    check_script(script, is_module=module)
    program = [*(["-m"] if module else []), script, *arguments]
    name = script.rpartition(".")[2] if module else Path(script).stem
    run_dir = Path(out or f"runs/{name}") if dry_run else new_run_dir(out, name)
    options = LaunchOptions(run_dir, "all", max_restarts, env.variable(env.STRATEGY, strategy), tuple(torchrun))
    with open_allocation(where, run_dir, None if module else Path(script), on_paper=dry_run) as allocation:
        cluster, num_workers = allocation.cluster, workers or len(allocation.cluster.devices)
        plan = spread(cluster, num_workers, threads)
        if strategy is not None:  # one worker, too, is told of a mistake in it
            mesh = parse_mesh(strategy, num_workers if num_workers > 1 else None, len(plan.placements))
            plan = spread(cluster, num_workers, threads, mesh if num_workers > 1 else None)
        plan = replace(plan, debug_comm=debug_comm)
        if dry_run:
            print(allocation.commands(plan, program, options))
        else:
            allocation.run(plan, program, options)
    return run_dir


def check_script(script: str, *, is_module: bool) -> None:
    """Raise `LaunchError` for a script or module that is not there."""
    places = [str(Path.cwd()), *sys.path]
    for name in script.split(".") if is_module else ():  # without an import, which would run the packages
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            hint = f"; to run the script, leave module = True out: {script}" if Path(script).is_file() else ""
            raise LaunchError(f"There is no module '{script}' in this folder or among what is installed{hint}.")
        places = list(spec.submodule_search_locations or ())
    if not is_module and not Path(script).is_file():
        hint = "" if script.endswith(".py") else f"; if it is a module, add -m: -m {script}"
        raise LaunchError(f"There is no script '{script}'{hint}.")


@checked
def scale(
    job: Job | str | Path,
    *,
    devices: Sequence[int] | str = "1,2",
    seeds: PositiveInt = 1,
    tolerance: UnitInterval = 0.01,
    efficiency_floor: UnitInterval = 0.5,
    grow: Grow = "none",
    data: str | Path | None = None,
    max_steps: PositiveInt | None = None,
    out: Path | str | None = None,
    settings: Sequence[str] = (),
    quiet: bool = True,
    where: Where = HERE,
    strategy: str | None = None,
    say: Say = silent,
) -> Study:
    """Train a job on several numbers of devices and return the study; it is also written to the study's folder.

    A study that was begun in the same folder is continued: runs that have ended are not repeated.
    Example: `study = paceline.scale("digits-lenet", devices=[1, 2], max_steps=20)`.

    Args:
        devices: the numbers of devices, one worker each; or a text such as "1,2,4" or "1..4".
        seeds: runs for each number of devices, each with another seed.
        tolerance: how much accuracy may be lost, absolute: 0.01 is one point.
        efficiency_floor: least scaling efficiency worth recommending, in [0, 1].
        grow: "none": the same global batch on every number of devices; "batch": the same batch for each device.
        out: the study's folder, for scaling.json, scaling.csv, report.html and the runs; None: a new one under runs/.
        job, data, max_steps, settings, quiet, where, strategy, say: as for `train`.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a run failed; the study of the others is written.
    """
    counts = read_counts("devices", devices)
    base = resolve_job(job, settings, data, is_run=True)
    study_dir, limit = new_run_dir(out, f"{base.name}-scaling"), RunLimit(max_steps)
    jobs = {count: base.scaled_for(count) if grow == "batch" else base for count in counts}
    runs = {f"devices{count}-seed{base.seed + n}": (count, base.seed + n) for n in range(seeds) for count in counts}
    records: list[RunRecord] = []
    failures: dict[str, WorkerFailed] = {}
    with open_allocation(where, study_dir) as allocation:
        cluster = allocation.cluster
        if cluster.device_kind == "cpu":  # a device is a fixed number of threads, or two would be no more than one
            settings = [f"plan.threads_per_worker={spread(cluster, counts[-1]).threads_per_worker}", *settings]
        plans = {count: plan_run(one, cluster, count, strategy, settings, say=say) for count, one in jobs.items()}
        if grow == "none":
            plans = {count: with_forecast(base, plan, say) for count, plan in plans.items()}
        for name, (count, seed) in runs.items():
            seeded, plan, run_dir = replace(jobs[count], seed=seed), plans[count], study_dir / "runs" / name
            if base.checkpoint.dir:  # or each run would go on with those of the run before
                seeded = seeded.with_values(checkpoint={"dir": f"{base.checkpoint.dir}/{name}"})
            try:
                record = _finished(run_dir, seeded, plan, max_steps)
                records.append(record or run_job(allocation, seeded, plan, run_dir, limit, quiet=quiet))
            except WorkerFailed as failure:
                failures[name] = failure
                say(f"{name}: {failure}")
    if records:
        study = _study(records, study_dir, grow, tolerance, efficiency_floor)
    if failures:
        told = "; ".join(f"{name}: {failure}".rstrip(".") for name, failure in failures.items())
        first = next(iter(failures.values()))
        raise WorkerFailed(f"{len(failures)} of {len(runs)} runs failed: {told}.", details=first.details)
    return study


def _finished(run_dir: Path, job: Job, plan: Plan, max_steps: int | None) -> RunRecord | None:
    """The record of the run in this folder if it has ended; everything that its speed depends on has to be the same."""
    record, remedy = finished_run(run_dir, job, max_steps), "name another folder"
    if record is not None:
        before, job_before = Plan.load(run_dir / PLAN_FILE, remedy), Job.load(run_dir / JOB_FILE, remedy)
        expected = replace(plan, forecast_samples_per_s=before.forecast_samples_per_s)
        if (changed := differences(before.to_mapping(), expected.to_mapping())) or job_before != job:
            told = "; ".join(changed) or "of a job with other keys"
            raise JobError(f"{run_dir} holds another run ({told}); set it back, or {remedy}.")
    return record


@checked
def report(
    runs: Iterable[Path | str] | Path | str,
    *,
    out: Path | str | None = None,
    tolerance: UnitInterval = 0.01,
    efficiency_floor: UnitInterval = 0.5,
) -> Study:
    """The study that the records in some run folders make.

    Example: `paceline.report(Path("runs").glob("mnist-*"))`.

    Args:
        runs: run folders, each with a record.json, or one of them.
        out: the folder for scaling.json, scaling.csv and report.html; None: nothing is written.
        tolerance, efficiency_floor: as for `scale`.

    Raises:
        PacelineError: a folder without a record, or with a damaged one; records that are not of one study.
    """
    folders = [runs] if isinstance(runs, Path | str) else runs
    remedy = f"name folders of finished runs, which hold a {RECORD_FILE} (a study has them in runs/)"
    records = [RunRecord.load(Path(folder) / RECORD_FILE, remedy) for folder in folders]
    return _study(records, None if out is None else Path(out), None, tolerance, efficiency_floor)


def _study(
    records: Sequence[RunRecord], folder: Path | None, grow: Grow | None, tolerance: float, efficiency_floor: float
) -> Study:
    """The study of these runs, written into a folder if there is one; `grow` None: as the records show."""
    from paceline.report.study import analyse, detect_grow
    from paceline.report.study_page import write_study  # loads a template engine

    grow = grow or detect_grow(records)
    study = analyse(records, grow=grow, tolerance=tolerance, efficiency_floor=efficiency_floor)
    if folder is not None:
        write_study(study, folder)
    return study


@checked
def watch(runs: Iterable[Path | str] | Path | str) -> None:
    """Show runs side by side in the terminal, and keep the tables up to date until all have ended, or Ctrl-C.

    Loss, throughput, where a step's time goes, evaluations, what every worker does, events, and how
    the jobs of the runs differ. Where standard output is no terminal, the tables are printed once.

    Example: `paceline.watch("runs/mnist-lenet")`.

    Args:
        runs: run folders, or one of them; runs of different jobs too.

    Raises:
        PacelineError: no such folder.
    """
    from rich.console import Console
    from rich.live import Live

    from paceline.hardware.nvml import gpu_use
    from paceline.report.watch import read_run, watch_table

    folders = [Path(run) for run in ([runs] if isinstance(runs, Path | str) else runs)]
    if not folders:
        raise PacelineError("watch needs at least one run folder, such as runs/mnist-lenet.")
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    with Live(console=console, auto_refresh=False) as shown, contextlib.suppress(KeyboardInterrupt):
        while True:
            found = [read_run(folder) for folder in folders]
            shown.update(watch_table(found, gpu_use()), refresh=console.is_terminal)
            if not console.is_terminal or {run.state for run in found} <= {"finished", "stopped", "failed", "silent"}:
                break
            time.sleep(1.0)
