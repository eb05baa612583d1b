"""`paceline launch`: a user's own script on several workers."""

from __future__ import annotations

from typing import Any

import typer

from paceline.cli.options import DryRun, options_of
from paceline.workflows import launch as workflow

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@options_of(workflow.launch)
def launch(context: typer.Context, dry_run: DryRun = False, **options: Any) -> None:
    """Run a script on workers of this machine or of several."""
    if dry_run:
        print(workflow.launch_commands(arguments=context.args, **options))
    else:
        workflow.launch(arguments=context.args, **options)
