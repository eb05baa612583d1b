"""`paceline watch`: a live page of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.workflows import watch as workflow


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, of runs that train or have ended.")],
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0: any.", min=0, max=65535)] = 0,
) -> None:
    """Show runs in the browser while they train."""

    def announce(address: str) -> None:
        print(f"Open {address} in a browser on this machine; Ctrl-C ends it.", flush=True)

    workflow.watch(runs, port=port, announce=announce)
