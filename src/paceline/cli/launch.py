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
from paceline.plan import spread
from paceline.spec import Job

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.init; its arguments follow.")],
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs; a new one under runs/.")] = None,
    threads: Threads = None,
) -> None:
    """Run a script on some workers of this machine."""
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    cluster = detect()
    plan = spread(cluster, workers or len(cluster.devices), threads)
    run_dir = out or new_run_dir(None, Job(name=script.stem))
    run_workers(plan, [str(script), *context.args], run_dir=run_dir, output="all")
