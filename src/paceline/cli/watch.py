"""`paceline watch`: a live page of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import options_of
from paceline.workflows import watch as workflow


@options_of(workflow.watch)
def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, of runs that train or have ended.")], **options: Any
) -> None:
    """Show runs in the browser while they train."""

    def announce(address: str) -> None:
        print(f"Open {address} in a browser on this machine; Ctrl-C ends it.", flush=True)

    workflow.watch(runs, announce=announce, **options)
