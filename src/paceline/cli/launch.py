"""`paceline launch`: a user's own script on several workers of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.execute import new_run_dir
from paceline.cli.options import Threads
from paceline.errors import LaunchError
from paceline.hardware import detect
from paceline.launch import run_workers
from paceline.spec import Job, Plan

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.init; its arguments follow.")],
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs; a new one under runs/.")] = None,
    threads: Threads = None,
) -> None:
    """Run a script on some workers of this machine."""
    run_script(script, context.args, workers, out or new_run_dir(None, Job(name=script.stem)), threads)


def run_script(
    script: Path, arguments: list[str], workers: int | None, run_dir: Path, threads: int | None = None
) -> None:
    """Run `script` on `workers` workers, one a device; raises what `run_workers` raises."""
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    cluster = detect()
    count = workers or len(cluster.devices)
    if cluster.device_kind == "cuda" and count > len(cluster.devices):
        raise LaunchError(f"{count} workers need as many GPUs, but this machine has {len(cluster.devices)}.")
    plan = Plan(
        world_size=count,
        device_kind=cluster.device_kind,
        threads_per_worker=threads or max(1, cluster.num_cores // count),
    )
    run_workers(plan, [str(script), *arguments], run_dir=run_dir, output="all")
