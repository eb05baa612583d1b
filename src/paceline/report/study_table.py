"""The study as a table for the terminal, plain when piped."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report import formats
from paceline.report.study import Study, StudyRow
from paceline.report.tables import table

MARK = "*"
"""Stands before the recommended device count, so that the mark survives a pipe without colours."""


def study_table(study: Study) -> RenderableType:
    """Devices x time x speed-up x efficiency x accuracy, the recommended row marked, the verdict below."""
    grows = study.grow == "batch"
    # The usual numbers fit into the 80 columns of a pipe; where they do not, cells fold and none is cut.
    headings = ["devices", *(["batch", "rate"] if grows else []), "time", "speed-up", "efficiency"]
    headings += [] if grows else ["samples/s"]
    headings += ["forecast", "error"] if study.has_forecast else []
    headings += ["accuracy", *(["spread"] if study.has_spread else []), "change"] if study.has_accuracy else []
    rows = table(*headings)
    for row in study.rows:
        rows.add_row(*_cells(study, row, grows), style="bold green" if _is_marked(study, row) else None)
    found = study.recommendation
    lines = [Text(found.verdict, style="bold"), Text(found.reason), *map(Text, found.rejected.values())]
    if study.same_weights:
        counts = formats.listing([str(row.devices) for row in study.rows])
        lines.append(Text(f"Same weights bit for bit on {counts} devices: {_hashes(study)}"))
    legend = Text(f"{MARK} recommended", style="dim") if len(study.rows) > 1 else Text()
    return Group(rows, legend, Text(), *lines)


def _is_marked(study: Study, row: StudyRow) -> bool:
    """A single device count is no choice and gets no mark."""
    return len(study.rows) > 1 and row.devices == study.recommendation.devices


def _cells(study: Study, row: StudyRow, grows: bool) -> list[str]:
    mark = f"{MARK} " if _is_marked(study, row) else ""
    cells = [f"{mark}{row.devices}"]
    if grows:
        cells += [str(row.global_batch_size), formats.rate(row.learning_rate)]
    cells += [
        formats.duration(row.train_s),
        formats.times(row.speedup),
        formats.percent(row.efficiency),
    ]
    if not grows:
        cells.append(formats.quantity(row.samples_per_s))
    if study.has_forecast:
        cells += [formats.quantity(row.forecast_samples_per_s), formats.signed_percent(row.forecast_error)]
    if study.has_accuracy:
        cells.append(formats.percent(row.accuracy, 2))
        if study.has_spread:
            # A spread of one seed is no spread.
            cells.append(formats.spread(row.accuracy_min, row.accuracy_max) if row.has_spread else formats.NOTHING)
        cells.append(formats.NOTHING if row is study.base else formats.points(row.accuracy_change))
    return cells


def _hashes(study: Study) -> str:
    return ", ".join(f"{digest[:12]} (seed {seed})" for seed, digest in study.base.weights_sha256.items())
