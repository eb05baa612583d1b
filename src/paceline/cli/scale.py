"""`paceline scale`: the scaling study, devices x time x accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    Algorithm,
    AsJson,
    ClusterFile,
    DataDir,
    EfficiencyFloor,
    GrowOption,
    JobArgument,
    MaxSteps,
    Quiet,
    Settings,
    Threads,
    Tolerance,
    grouped,
    parse_counts,
    parse_tolerance,
    to_stderr,
)
from paceline.errors import WorkerFailed
from paceline.workflows import scale as workflow
from paceline.workflows.forecasts import CLUSTER_FILE
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import new_run_dir
from paceline.workflows.strategy import PLAIN, Strategy
from paceline.workflows.where import HERE, Where


@grouped
def scale(
    job: JobArgument,
    devices: Annotated[str, typer.Option(help="Device counts, such as 1,2,4.")] = "1,2",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per device count, each with a seed of its own.")] = 1,
    tolerance: Tolerance = "1%",
    efficiency_floor: EfficiencyFloor = 0.5,
    grow: GrowOption = "none",
    data: DataDir = None,
    max_steps: MaxSteps = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder (default: a new one under runs/).")] = None,
    settings: Settings = None,
    threads: Threads = None,
    algorithm: Algorithm = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
    where: Where = HERE,
    strategy: Strategy = PLAIN,
    cluster: ClusterFile = CLUSTER_FILE,
) -> None:
    """Train a job on 1, 2, … N devices and write the study: scaling.json, scaling.csv, report.html."""
    from rich.console import Console

    counts = parse_counts(devices, "--devices")
    margin = parse_tolerance(tolerance)
    resolved = resolve_job(job, settings, data)
    study_dir = out or new_run_dir(None, f"{resolved.name}-scaling")
    failures: list[str] = []

    def on_failure(name: str, failure: WorkerFailed) -> None:
        failures.append(f"{name}: {failure}")
        to_stderr(f"{failure.details}\npaceline: {failures[-1]}")

    study = workflow.scale(
        resolved,
        devices=counts,
        seeds=seeds,
        tolerance=margin,
        efficiency_floor=efficiency_floor,
        grow=grow,
        max_steps=max_steps,
        out=study_dir,
        threads=threads,
        algorithm=algorithm,
        quiet=quiet,
        where=where,
        strategy=strategy,
        cluster=cluster,
        say=to_stderr,
        on_failure=on_failure,
    )
    if as_json:
        print(json.dumps(json.loads((study_dir / "scaling.json").read_text(encoding="utf-8"))))
    else:
        from paceline.report import study_table

        Console().print(study_table(study))
        print(study_dir / "report.html")
    if failures:
        raise WorkerFailed(workflow.failed_runs(failures, len(counts) * seeds))
