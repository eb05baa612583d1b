"""`paceline.scale`: the scaling study, devices x time x accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, WorkerFailed
from paceline.plan import spread
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.forecast import Grow
from paceline.spec.job import differences
from paceline.spec.plan import RunLimit
from paceline.spec.record import RECORD_FILE
from paceline.workflows.arguments import Say, checked, read_counts, silent
from paceline.workflows.jobs import resolve_job
from paceline.workflows.plan import with_forecast
from paceline.workflows.run_folder import begun_with, new_run_dir
from paceline.workflows.strategy import place_run, split_settings
from paceline.workflows.train import run_job
from paceline.workflows.where import HERE, Where, open_allocation

if TYPE_CHECKING:
    from paceline.report.study import Study


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
    quiet: bool = True,
    where: Where = HERE,
    strategy: str | None = None,
    say: Say = silent,
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
        model, data, max_steps, settings, quiet, where, strategy, say: as for `train`.

    Raises:
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a run failed; the study of the others is written.
    """
    counts = read_counts("devices", devices)
    of_job, of_plan = split_settings(settings)
    base = resolve_job(job, of_job, data, model)
    study_dir, limit = new_run_dir(out, f"{base.name}-scaling"), RunLimit(max_steps)
    jobs = {count: base.grown(count) if grow == "batch" else base for count in counts}
    names = {
        (count, seed): f"devices{count}-seed{seed}" for seed in range(base.seed, base.seed + seeds) for count in counts
    }
    for file in sorted(study_dir.glob(f"runs/*/{RECORD_FILE}")):
        if file.parent.name not in names.values():
            raise JobError(
                f"{study_dir} holds a study with {file.parent.name}, which this one would leave out: ask for all its "
                "devices and seeds, or name another folder for this study."
            )
    records: list[RunRecord] = []
    failures: dict[str, WorkerFailed] = {}
    with open_allocation(where, study_dir) as allocation:
        # A CPU device is a fixed number of threads, or two devices would be no more than one.
        num_threads = spread(allocation.cluster, counts[-1]).threads_per_worker
        of_plan = [f"plan.threads_per_worker={num_threads}", *of_plan]
        plans = [place_run(jobs[count], allocation.cluster, count, strategy, of_plan, say=say) for count in counts]
        if grow == "none":
            plans = [with_forecast(base, plan, say) for plan in plans]
        for (count, seed), name in names.items():
            seeded, run_dir = replace(jobs[count], seed=seed), study_dir / "runs" / name
            plan = plans[counts.index(count)]
            if (run_dir / RECORD_FILE).exists():
                _check_same(run_dir, seeded, plan, max_steps)
                records.append(RunRecord.load(run_dir / RECORD_FILE))
                continue
            try:
                records.append(run_job(allocation, seeded, plan, run_dir, limit, quiet=quiet))
            except WorkerFailed as failure:
                failures[name] = failure
                say(f"{name}: {failure}")
    if records:
        from paceline.report.study import analyse
        from paceline.report.study_page import write_study  # loads a template engine

        study = analyse(records, grow=grow, tolerance=tolerance, efficiency_floor=efficiency_floor)
        write_study(study, study_dir)
    if failures:
        told = "; ".join(f"{name}: {failure}".rstrip(".") for name, failure in failures.items())
        first = next(iter(failures.values()))
        raise WorkerFailed(f"{len(failures)} of {len(names)} runs failed: {told}.", details=first.details)
    return study


def _check_same(run_dir: Path, job: Job, plan: Plan, max_steps: int | None) -> None:
    """Raise `JobError` where the finished run in this folder is another one; its forecast does not count."""
    before, planned, limit = begun_with(run_dir)
    changes = differences(before.to_mapping(), job.to_mapping()) or ["its job is another"] * (before != job)
    changes += [f"max_steps was {limit} and is {max_steps}"] * (limit != max_steps)
    expected = replace(planned, forecast_samples_per_s=plan.forecast_samples_per_s)
    changes += ["its plan is another"] * (expected != plan)
    if changes:
        raise JobError(f"{run_dir} holds another run ({'; '.join(changes)}); name another folder for this study.")
