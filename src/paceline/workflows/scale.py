"""`paceline.scale`: the scaling study, devices x time x accuracy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import env
from paceline.errors import JobError, WorkerFailed
from paceline.plan import spread
from paceline.spec import AlgorithmName, Job, Plan, RunRecord
from paceline.spec.forecast import Grow
from paceline.spec.job import differences
from paceline.spec.plan import RunLimit
from paceline.spec.record import RECORD_FILE
from paceline.words import and_more
from paceline.workflows.allocation import Allocation, open_allocation
from paceline.workflows.arguments import checked
from paceline.workflows.forecasts import CLUSTER_FILE, feed_back, with_forecasts, without_forecasts
from paceline.workflows.jobs import (
    Say,
    check_amounts,
    check_counts,
    import_folders,
    read_counts,
    resolve_job,
    silent,
)
from paceline.workflows.run_folder import begun_with, finished_record, new_run_dir, write_run
from paceline.workflows.strategy import PLAIN, Strategy
from paceline.workflows.where import HERE, Where

if TYPE_CHECKING:
    from paceline.report.study import Study

OnFailure = Callable[[str, WorkerFailed], None]
_RUNS = "runs"
"""The folder of a study's runs."""


@checked
def scale(
    job: Job | str | Path,
    *,
    devices: Sequence[int] | str = (1, 2),
    seeds: int = 1,
    tolerance: float = 0.01,
    efficiency_floor: float = 0.5,
    grow: Grow = "none",
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    max_steps: int | None = None,
    out: Path | str | None = None,
    settings: Sequence[str] = (),
    threads: int | None = None,
    algorithm: AlgorithmName = "auto",
    quiet: bool = True,
    where: Where = HERE,
    strategy: Strategy | str = PLAIN,
    cluster: Path | str = CLUSTER_FILE,
    say: Say = silent,
    on_failure: OnFailure | None = None,
) -> Study:
    """Train a job on several numbers of devices and return the study; it is also written to the study's folder.

    A study that was begun in the same folder is continued: runs with a record are not repeated, and all of them have
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
        on_failure: called with the name of each failed run and the reason, and the study continues; None: the error
            is raised when the study is written.
        model, data, max_steps, settings, threads, algorithm, quiet, where, strategy, cluster, say: as for `train`.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: every run failed; or one did, and there is no `on_failure`.
    """
    check_counts(seeds=seeds, max_steps=max_steps, threads=threads)
    counts = read_counts("devices", devices)
    check_amounts(tolerance=tolerance, efficiency_floor=efficiency_floor)
    strategy = Strategy(strategy) if isinstance(strategy, str) else strategy
    base = resolve_job(job, settings, data, model)
    study_dir = new_run_dir(out, f"{base.name}-scaling")
    cluster_file = Path(cluster)
    jobs = {count: base.grown(count) if grow == "batch" else base for count in counts}
    seeds_in_turn = range(base.seed, base.seed + seeds)
    _check_keeps_all(study_dir, {_run_name(count, seed) for count in counts for seed in seeds_in_turn})
    records: list[RunRecord] = []
    failures: list[str] = []
    tell = on_failure or (lambda name, failure: failures.append(f"{name}: {failure}"))
    with open_allocation(where, study_dir) as allocation:
        # A CPU device is a fixed number of threads, or two devices would be no more than one.
        threads = threads or spread(allocation.cluster, counts[-1]).threads_per_worker
        plans = [
            strategy.placed(
                jobs[count], allocation.cluster, count, say=say, threads_per_worker=threads, algorithm=algorithm
            )
            for count in counts
        ]
        if grow == "none":
            plans = with_forecasts(base, plans, cluster_file, say)
        for seed in seeds_in_turn:
            for count, plan in zip(counts, plans, strict=True):
                name = _run_name(count, seed)
                seeded, run_dir = dataclasses.replace(jobs[count], seed=seed), study_dir / _RUNS / name
                try:
                    records.append(_record(seeded, plan, run_dir, max_steps, allocation, cluster_file, quiet))
                except WorkerFailed as failure:
                    tell(name, failure)
    if not records:
        told = "; ".join(failures) or "the first reason stands above"
        raise WorkerFailed(f"Every run of the study failed; {told.removesuffix('.')}.")
    from paceline.report.study import analyse
    from paceline.report.study_files import write_study  # loads a template engine

    study = analyse(records, grow=grow, tolerance=tolerance, efficiency_floor=efficiency_floor)
    write_study(study, study_dir)
    if failures:
        raise WorkerFailed(failed_runs(failures, len(records) + len(failures)))
    return study


def _run_name(count: int, seed: int) -> str:
    return f"devices{count}-seed{seed}"


def _check_keeps_all(study_dir: Path, names: Container[str]) -> None:
    """Raise `JobError` where a study in this folder has finished runs that the study of these names leaves out."""
    left_out = [file.parent.name for file in sorted(study_dir.glob(f"{_RUNS}/*/{RECORD_FILE}"))]
    left_out = [name for name in left_out if name not in names]
    if left_out:
        raise JobError(
            f"{study_dir} holds a study with {left_out[0]}{and_more(len(left_out) - 1)}, which this one would leave "
            "out: ask for all of its devices and seeds, or name another folder for this study."
        )


def failed_runs(failures: Sequence[str], num_runs: int) -> str:
    """The sentence about the runs of a study that failed."""
    return f"{len(failures)} of {num_runs} runs failed: {'; '.join(failures)}"


def _record(
    job: Job, plan: Plan, run_dir: Path, max_steps: int | None, allocation: Allocation, cluster: Path, quiet: bool
) -> RunRecord:
    """The record of this very run where the study was begun before, else of a new one."""
    if (run_dir / RECORD_FILE).exists():
        before, planned, limit = begun_with(run_dir)
        changes = differences(before.to_mapping(), job.to_mapping()) or ["its job is another"] * (before != job)
        changes += [f"max_steps was {limit} and is {max_steps}"] * (limit != max_steps)
        changes += ["its plan is another"] * (without_forecasts(planned) != without_forecasts(plan))
        if not changes:
            return RunRecord.load(run_dir / RECORD_FILE)
        raise JobError(f"{run_dir} holds another run ({'; '.join(changes)}); name another folder for this study.")
    started = time.monotonic()
    program = write_run(job, plan, run_dir, RunLimit(max_steps), quiet=quiet)
    environ = env.import_note(import_folders(job))
    allocation.run(plan, program, run_dir=run_dir, environ=environ)
    record = finished_record(run_dir, started, was_elsewhere=allocation.is_elsewhere)
    feed_back(record, cluster)
    return record
