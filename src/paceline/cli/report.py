"""`paceline report`: the study again, from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import options_of
from paceline.workflows import report as workflow


@options_of(
    workflow.report, out={"default": Path(), "help": "The folder for scaling.json, scaling.csv and report.html."}
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, each with a record.json.")], **options: Any
) -> None:
    """Write tables and the HTML page from run folders."""
    from rich.console import Console

    from paceline.report.study_page import study_table

    Console(markup=False).print(study_table(workflow.report(runs, **options)))
    print(options["out"] / "report.html")
