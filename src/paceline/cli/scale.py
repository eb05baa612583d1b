"""`paceline scale`: the scaling study, devices x time x accuracy."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    Algorithm,
    AsJson,
    DataDir,
    JobArgument,
    MaxSteps,
    Quiet,
    Settings,
    Threads,
    parse_counts,
    parse_tolerance,
)
from paceline.errors import JobError, WorkerFailed
from paceline.plan import spread
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.forecast import Grow
from paceline.workflows.allocation import ANYWHERE, Allocation, Where, open_allocation, says_where
from paceline.workflows.forecasts import CLUSTER_FILE, ClusterFile, feed_back, with_forecasts, without_forecasts
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import begun_with, execute, new_run_dir
from paceline.workflows.strategy import PLAIN, Strategy


@says_where
def scale(
    job: JobArgument,
    devices: Annotated[str, typer.Option(help="Device counts, such as 1,2,4.")] = "1,2",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per device count, each with a seed of its own.")] = 1,
    tolerance: Annotated[str, typer.Option(help="Accuracy that may be lost, such as 1%.")] = "1%",
    efficiency_floor: Annotated[
        float, typer.Option(min=0, max=1, help="Least scaling efficiency worth recommending.")
    ] = 0.5,
    grow: Annotated[
        Grow, typer.Option(help="none: same global batch on every count; batch: same batch per device.")
    ] = "none",
    data: DataDir = None,
    max_steps: MaxSteps = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder; a new one under runs/.")] = None,
    settings: Settings = None,
    threads: Threads = None,
    algorithm: Algorithm = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
    where: Where = ANYWHERE,
    strategy: Strategy = PLAIN,
    cluster: ClusterFile = CLUSTER_FILE,
) -> None:
    """Train a job on 1, 2, … N devices and write the study: scaling.json, scaling.csv, report.html."""
    # The page needs a template engine and a plotting library: not for `paceline --help`.
    from rich.console import Console

    from paceline.report import analyse, study_table, write_study

    counts = parse_counts(devices, "--devices")
    margin = parse_tolerance(tolerance)
    base = resolve_job(job, settings, data)
    study_dir = out or new_run_dir(None, dataclasses.replace(base, name=f"{base.name}-scaling"))
    records: list[RunRecord] = []
    failures: list[str] = []
    with open_allocation(where, study_dir) as site:
        # A CPU device is a fixed number of threads, or two devices would be no more than one.
        threads = threads or spread(site.cluster, counts[-1]).threads_per_worker
        jobs = [base.grown(count) if grow == "batch" else base for count in counts]
        plans = [
            strategy.placed(one, site.cluster, count, threads_per_worker=threads, algorithm=algorithm)
            for one, count in zip(jobs, counts, strict=True)
        ]
        if grow == "none":
            plans = with_forecasts(base, plans, cluster)
        todo = [
            (f"devices{count}-seed{seed}", dataclasses.replace(one, seed=seed), plan)
            for seed in range(base.seed, base.seed + seeds)
            for count, one, plan in zip(counts, jobs, plans, strict=True)
        ]
        for name, one, plan in todo:
            try:
                records.append(_record_of(one, plan, study_dir / "runs" / name, site, cluster, max_steps, quiet))
            except WorkerFailed as failure:
                failures.append(f"{name}: {failure}")
                print(f"{failure.details}\npaceline: {failures[-1]}", file=sys.stderr)
    if not records:
        raise WorkerFailed("Every run of the study failed; the first reason stands above.")

    study = analyse(
        records,
        grow=grow,
        tolerance=margin,
        efficiency_floor=efficiency_floor,
    )
    write_study(study, study_dir)
    if as_json:
        print(json.dumps(json.loads((study_dir / "scaling.json").read_text(encoding="utf-8"))))
    else:
        Console().print(study_table(study))
        print(study_dir / "report.html")
    if failures:
        raise WorkerFailed(f"{len(failures)} of {len(todo)} runs failed: {'; '.join(failures)}")


def _record_of(
    job: Job, plan: Plan, run_dir: Path, site: Allocation, cluster: Path, max_steps: int | None, quiet: bool
) -> RunRecord:
    """The record of this very run if the study was begun before, else of a new one."""
    path = run_dir / "record.json"
    if path.exists():
        begun_job, begun_plan, begun_steps = begun_with(run_dir)
        if (begun_job, without_forecasts(begun_plan), begun_steps) == (job, without_forecasts(plan), max_steps):
            return RunRecord.load(path)
        raise JobError(f"{run_dir} holds a run of another job; choose another --out for this study.")
    record = execute(job, plan, run_dir, site, max_steps=max_steps, quiet=quiet)
    feed_back([record], cluster)
    return record
