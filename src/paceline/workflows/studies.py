"""Runs side by side: `paceline.scale` makes them, `paceline.report` reads them, `paceline.watch` shows them train."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, PacelineError, WorkerFailed
from paceline.plan import spread
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.codec import PositiveInt, UnitInterval
from paceline.spec.forecast import Grow
from paceline.spec.job import JOB_FILE
from paceline.spec.plan import PLAN_FILE, RunLimit
from paceline.spec.record import RECORD_FILE
from paceline.workflows.arguments import Say, checked, read_counts, silent
from paceline.workflows.jobs import place_run, resolve_job
from paceline.workflows.plan import with_forecast
from paceline.workflows.train import finished_run, new_run_dir, run_job
from paceline.workflows.where import HERE, Where, open_allocation

if TYPE_CHECKING:
    from paceline.report.study import Study

INTERVAL_S = 1.0
"""How often the tables of `watch` are brought up to date."""


@checked
def scale(
    job: Job | str | Path,
    *,
    devices: Sequence[int] | str = (1, 2),
    seeds: PositiveInt = 1,
    tolerance: UnitInterval = 0.01,
    efficiency_floor: UnitInterval = 0.5,
    grow: Grow = "none",
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    max_steps: PositiveInt | None = None,
    out: Path | str | None = None,
    settings: Sequence[str] = (),
    quiet: bool = True,
    where: Where = HERE,
    strategy: str | None = None,
    say: Say = silent,
) -> Study:
    """Train a job on several numbers of devices and return the study; it is also written to the study's folder.

    A study that was begun in the same folder is continued: runs that have ended are not repeated, and all of them have
    to be among those that are asked for.
    Example: `study = paceline.scale("digits-lenet", devices=[1, 2], max_steps=20)`.

    Args:
        job: a job, a job file (TOML) or the name of a recipe.
        devices: the numbers of devices, one worker each; or a text such as "1,2,4" or "1..4".
        seeds: runs for each number of devices, each with another seed.
        tolerance: how much accuracy may be lost, absolute: 0.01 is one point.
        efficiency_floor: least scaling efficiency worth recommending, in [0, 1].
        grow: "none": the same global batch on every number of devices; "batch": the same batch for each device.
        out: the study's folder, for scaling.json, scaling.csv, report.html and the runs; None: a new one under runs/.
        model, data, max_steps, settings, quiet, where, strategy, say: as for `train`.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a run failed; the study of the others is written.
    """
    counts = read_counts("devices", devices)
    base = resolve_job(job, settings, data, model, is_run=True)
    study_dir, limit = new_run_dir(out, f"{base.name}-scaling"), RunLimit(max_steps)
    jobs = {count: base.grown(count) if grow == "batch" else base for count in counts}
    runs = {f"devices{count}-seed{base.seed + n}": (count, base.seed + n) for n in range(seeds) for count in counts}
    for file in sorted(study_dir.glob(f"runs/*/{RECORD_FILE}")):
        if file.parent.name not in runs:
            raise JobError(
                f"{study_dir} holds a study with {file.parent.name}, which this one would leave out: ask for all its "
                "devices and seeds, or name another folder for this study."
            )
    records: list[RunRecord] = []
    failures: dict[str, WorkerFailed] = {}
    with open_allocation(where, study_dir) as allocation:
        # A CPU device is a fixed number of threads, or two devices would be no more than one.
        num_threads = spread(allocation.cluster, counts[-1]).threads_per_worker
        settings, cluster = [f"plan.threads_per_worker={num_threads}", *settings], allocation.cluster
        plans = {count: place_run(one, cluster, count, strategy, settings, say=say) for count, one in jobs.items()}
        if grow == "none":
            plans = {count: with_forecast(base, plan, say) for count, plan in plans.items()}
        for name, (count, seed) in runs.items():
            seeded, plan, run_dir = replace(jobs[count], seed=seed), plans[count], study_dir / "runs" / name
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
    """The record of the run in this folder if it has ended; whatever its speed follows from has to be the same."""
    record = finished_run(run_dir, job, max_steps)
    if record is not None:
        before = Plan.load(run_dir / PLAN_FILE)
        expected = replace(plan, forecast_samples_per_s=before.forecast_samples_per_s)
        if (Job.load(run_dir / JOB_FILE), before) != (job, expected):
            raise JobError(f"{run_dir} holds a run of another plan or job; name another folder for this study.")
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
        tolerance: how much accuracy may be lost, absolute: 0.01 is one point.
        efficiency_floor: least scaling efficiency worth recommending, in [0, 1].

    Raises:
        PacelineError: a folder without a record, or with a damaged one; records that are not of one study.
    """
    folders = [runs] if isinstance(runs, Path | str) else runs
    records = [RunRecord.load(Path(folder) / RECORD_FILE) for folder in folders]
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
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    with Live(console=console, auto_refresh=False) as shown, contextlib.suppress(KeyboardInterrupt):
        while True:
            found = [read_run(folder) for folder in folders]
            shown.update(watch_table(found, gpu_use()), refresh=console.is_terminal)
            if not console.is_terminal or all(run.state in ("finished", "failed", "silent") for run in found):
                break
            time.sleep(INTERVAL_S)
