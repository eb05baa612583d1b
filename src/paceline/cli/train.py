"""`paceline train`: one run of a job."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.catalog import show_recipes
from paceline.cli.options import (
    Algorithm,
    AsJson,
    ClusterFile,
    DataDir,
    DebugComm,
    DryRun,
    JobArgument,
    MaxSteps,
    MicroBatch,
    Quiet,
    Servers,
    Settings,
    Threads,
    Trackers,
    Workers,
    grouped,
    to_stderr,
)
from paceline.workflows import train as workflow
from paceline.workflows.forecasts import CLUSTER_FILE
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import new_run_dir
from paceline.workflows.strategy import PLAIN, Strategy
from paceline.workflows.where import HERE, RIGID, Elastic, Where


def _print_recipes(is_asked: bool) -> None:
    if is_asked:
        show_recipes()
        raise typer.Exit


@grouped
def train(
    job: JobArgument,
    workers: Workers = None,
    data: DataDir = None,
    max_steps: MaxSteps = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES", help="Save and end after this time since the launch; the same command goes on."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder, where a run that was begun goes on (default: a new one under runs/)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Go on from a checkpoint of another job.")] = False,
    settings: Settings = None,
    threads: Threads = None,
    micro_batch_size: MicroBatch = None,
    algorithm: Algorithm = "auto",
    servers: Servers = 1,
    track: Trackers = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    where: Where = HERE,
    elastic: Elastic = RIGID,
    strategy: Strategy = PLAIN,
    debug_comm: DebugComm = False,
    cluster: ClusterFile = CLUSTER_FILE,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="What paceline plan wrote; options given here win over it."),
    ] = None,
    dry_run: DryRun = False,
    _list: Annotated[
        bool, typer.Option("--list", callback=_print_recipes, is_eager=True, help="List the recipes and exit.")
    ] = False,
) -> None:
    """Train a job on some workers of this machine, or of several."""
    options: dict[str, Any] = {
        "workers": workers,
        "max_steps": max_steps,
        "max_minutes": max_minutes,
        "force": force,
        "threads": threads,
        "micro_batch_size": micro_batch_size,
        "algorithm": algorithm,
        "servers": servers,
        "track": track or (),
        "quiet": quiet,
        "where": where,
        "elastic": elastic,
        "strategy": strategy,
        "debug_comm": debug_comm,
        "cluster": cluster,
        "plan": plan,
        "say": to_stderr,
    }
    resolved = resolve_job(job, settings, data)
    if dry_run:
        print(workflow.train_commands(resolved, out=out, **options))
        return
    run_dir = new_run_dir(out, resolved.name, may_be_finished=True)
    try:
        record = workflow.train(resolved, out=run_dir, **options)
    except (KeyboardInterrupt, SystemExit):
        _say_how_to_go_on(run_dir, is_named=out is not None)
        raise
    if not record.is_complete:
        _say_how_to_go_on(run_dir, is_named=out is not None)
    if as_json:
        print(json.dumps(record.summary()))
        return
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}, "
    expected = record.plan.forecast_samples_per_s
    forecast = "" if expected is None else f" (forecast {expected:,.0f})"
    print(
        f"{accuracy}{record.samples_per_s:,.0f} samples/s{forecast} on {record.world_size} x "
        f"{record.plan.device_kind}, {record.steps} steps in {record.train_s:.1f} s ({record.wall_s:.1f} s in all)\n"
        f"weights_sha256 {record.weights_sha256}\n{run_dir}/record.json"
    )


def _say_how_to_go_on(run_dir: Path, *, is_named: bool) -> None:
    """Say which command goes on with a run that was interrupted.

    Args:
        is_named: whether the command names the run's folder.
    """
    if (run_dir / "checkpoints" / "latest").exists():
        command = shlex.join(["paceline", *sys.argv[1:], *([] if is_named else ["--out", str(run_dir)])])
        to_stderr(f"To go on: {command}")
