"""`paceline watch`: runs in the terminal, while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.workflows import watch as workflow


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, of runs that train or have ended.")],
) -> None:
    """Show runs in the terminal while they train."""
    workflow.watch(runs)
