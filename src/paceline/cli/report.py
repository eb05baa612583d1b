"""`paceline report`: the study again, from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from paceline.cli.options import parse_tolerance
from paceline.errors import JobError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, each with a record.json.")],
    out: Annotated[Path, typer.Option(help="Where to write scaling.json, scaling.csv and report.html.")] = Path("."),
    grow: Annotated[str, typer.Option(help="How the runs grew: none or batch.")] = "none",
    tolerance: Annotated[str, typer.Option(help="Accuracy that may be lost, such as 1%.")] = "1%",
    efficiency_floor: Annotated[
        float, typer.Option(min=0, max=1, help="Least scaling efficiency worth recommending.")
    ] = 0.5,
) -> None:
    """Write tables and the HTML page from run folders."""
    from paceline.report import analyse, load_records, print_study, write_study

    if grow not in ("none", "batch"):
        raise JobError(f"--grow {grow} is not possible; it is none or batch.")
    study = analyse(
        load_records(runs),
        grow=cast(Literal["none", "batch"], grow),
        tolerance=parse_tolerance(tolerance),
        efficiency_floor=efficiency_floor,
    )
    write_study(study, out)
    print_study(study)
    print(out / "report.html")
