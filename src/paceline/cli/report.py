"""`paceline report`: the study again, from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import parse_tolerance


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, each with a record.json.")],
    out: Annotated[Path, typer.Option(help="Where to write scaling.json, scaling.csv and report.html.")] = Path(),
    tolerance: Annotated[str, typer.Option(help="Accuracy that may be lost, such as 1%.")] = "1%",
    efficiency_floor: Annotated[
        float, typer.Option(min=0, max=1, help="Least scaling efficiency worth recommending.")
    ] = 0.5,
) -> None:
    """Write tables and the HTML page from run folders."""
    # The page needs a template engine and a plotting library: not for `paceline --help`.
    from rich.console import Console

    from paceline.report import analyse, detect_grow, load_records, study_table, write_study

    records = load_records(runs)
    study = analyse(
        records,
        grow=detect_grow(records),
        tolerance=parse_tolerance(tolerance),
        efficiency_floor=efficiency_floor,
    )
    write_study(study, out)
    Console().print(study_table(study))
    print(out / "report.html")
