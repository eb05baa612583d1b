"""`paceline verify`: proof, on the user's own model, that N workers compute what one does."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from paceline import env
from paceline.cli.options import AsJson, DataDir, Settings, parse_counts
from paceline.errors import LaunchError
from paceline.hardware import detect
from paceline.launch import run_workers
from paceline.plan import spread
from paceline.spec import Cluster, Job, Plan
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import write_run
from paceline.workflows.strategy import Strategy

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def verify(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB|SCRIPT.py", help="A job, a recipe, or a script of yours.")],
    workers: Annotated[str, typer.Option(help="Numbers of workers to compare.")] = "1,2,4",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 5,
    data: DataDir = None,
    settings: Settings = None,
    as_json: AsJson = False,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME|MESH", help="How more than one worker share the model; see paceline train."),
    ] = None,
) -> None:
    """Check that N workers compute what one does; name the first tensor that differs, and the likely cause.

    A job with numeric parity is compared in float64, so that rounding cannot hide a difference; a script runs as it
    is, with the arguments that follow.
    """
    # The report package brings its page and plots along: not for `paceline --help`.
    from paceline.report.parity import compare, load_trace

    counts = parse_counts(workers, "--workers")
    cluster = detect()
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
        traces = []
        # The smallest count twice: what differs between equal runs has nothing to do with the number of workers.
        for number, count in enumerate([counts[0], *counts]):
            run_dir = Path(scratch) / str(number)
            run_dir.mkdir()
            program, plan = (
                _script(Path(job), context.args, count, cluster)
                if job.endswith(".py")
                else _job(resolve_job(job, settings, data), count, cluster, run_dir, strategy if count > 1 else None)
            )
            if not as_json:
                print(f"training {steps} steps on {count} worker{'s' if count > 1 else ''} …", file=sys.stderr)
            # A script is told by the environment; one worker has nobody to share with.
            environ = env.trace_request(run_dir / "trace", steps) | env.strategy_note(strategy if count > 1 else None)
            run_workers(plan, program, run_dir=run_dir, environ=environ)
            traces.append(load_trace(run_dir / "trace", count))
        verdicts = compare(traces[0], traces[1], traces[2:])

    if as_json:
        print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts]))
    else:
        for verdict in verdicts:
            print(verdict.sentence())
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(1)


def _job(job: Job, count: int, cluster: Cluster, run_dir: Path, strategy: str | None) -> tuple[list[str], Plan]:
    if job.parity == "numeric":
        job = job.with_values(precision="float64")
    plan = Strategy(strategy).placed(job, cluster, count, threads_per_worker=1)
    return write_run(job, plan, run_dir, quiet=True), plan


def _script(script: Path, arguments: list[str], count: int, cluster: Cluster) -> tuple[list[str], Plan]:
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    return [str(script), *arguments], spread(cluster, count, threads_per_worker=1)
