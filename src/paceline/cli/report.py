"""`paceline report`: the study again, from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import EfficiencyFloor, Tolerance, parse_tolerance
from paceline.workflows import report as workflow


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, each with a record.json.")],
    out: Annotated[Path, typer.Option(help="Where to write scaling.json, scaling.csv and report.html.")] = Path(),
    tolerance: Tolerance = "1%",
    efficiency_floor: EfficiencyFloor = 0.5,
) -> None:
    """Write tables and the HTML page from run folders."""
    from rich.console import Console

    from paceline.report import study_table

    study = workflow.report(runs, out=out, tolerance=parse_tolerance(tolerance), efficiency_floor=efficiency_floor)
    Console().print(study_table(study))
    print(out / "report.html")
