"""`paceline.report`: a study again, from the folders of its runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.spec.record import RECORD_FILE, RunRecord
from paceline.workflows.arguments import checked

if TYPE_CHECKING:
    from paceline.report.study import Study


@checked
def report(
    runs: Iterable[Path | str] | Path | str,
    *,
    out: Path | str | None = None,
    tolerance: float = 0.01,
    efficiency_floor: float = 0.5,
) -> Study:
    """The study that the records in some run folders make.

    Example: `paceline.report(Path("runs").glob("mnist-*"))`.

    Args:
        runs: run folders, each with a record.json, or one of them.
        out: the folder for scaling.json, scaling.csv and report.html; None: nothing is written.
        tolerance: how much accuracy may be lost, absolute: 0.01 is one point.
        efficiency_floor: least scaling efficiency worth recommending, in [0, 1].

    Raises:
        PacelineError: a folder without a record, or with a damaged one; records that are not of one study.
    """
    from paceline.report.study import analyse, detect_grow
    from paceline.report.study_page import write_study

    folders = [runs] if isinstance(runs, Path | str) else runs
    records = [RunRecord.load(Path(folder) / RECORD_FILE) for folder in folders]
    study = analyse(records, grow=detect_grow(records), tolerance=tolerance, efficiency_floor=efficiency_floor)
    if out is not None:
        write_study(study, Path(out))
    return study
