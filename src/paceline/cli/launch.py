"""`paceline launch`: a user's own script on several workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import DebugComm, DryRun, MicroBatch, Threads, Workers, grouped
from paceline.workflows import launch as workflow
from paceline.workflows.where import HERE, RIGID, Elastic, Where

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@grouped
def launch(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(help="A Python script, for torchrun or paceline.init; its arguments follow.")
    ],
    workers: Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs (default: a new one under runs/).")] = None,
    threads: Threads = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME|MESH", help="How workers divide the model, unless the script says it itself."),
    ] = None,
    micro_batch_size: MicroBatch = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    where: Where = HERE,
    elastic: Elastic = RIGID,
    debug_comm: DebugComm = False,
    dry_run: DryRun = False,
) -> None:
    """Run a script on some workers of this machine, or of several."""
    options: dict[str, Any] = {
        "workers": workers,
        "out": out,
        "threads": threads,
        "strategy": strategy,
        "micro_batch_size": micro_batch_size,
        "module": module,
        "where": where,
        "elastic": elastic,
        "debug_comm": debug_comm,
    }
    if dry_run:
        print(workflow.launch_commands(script, context.args, **options))
    else:
        workflow.launch(script, context.args, **options)
