"""The study as a table for the terminal, plain when piped."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report import formats
from paceline.report.study import Study, StudyRow
from paceline.report.tables import table
from paceline.words import listing

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
    rows, cells = table(*headings), figures(study)
    for row in study.rows:
        is_marked = len(study.rows) > 1 and row is study.recommended  # one row alone is no choice
        first, *others = (cells[heading](row) for heading in headings)
        rows.add_row(f"{MARK} {first}" if is_marked else first, *others, style="bold green" if is_marked else None)
    found = study.recommendation
    lines = [Text(found.verdict, style="bold"), Text(found.reason), *map(Text, found.rejected.values())]
    if study.same_weights:
        counts = listing([str(row.devices) for row in study.rows])
        lines.append(Text(f"Same weights bit for bit on {counts} devices: {_hashes(study)}"))
    legend = Text(f"{MARK} recommended", style="dim") if len(study.rows) > 1 else Text()
    return Group(rows, legend, Text(), *lines)


def figures(study: Study) -> dict[str, Callable[[StudyRow], str]]:
    """What tables say of a row, by the heading in a terminal."""
    return {
        "devices": lambda row: str(row.devices),
        "batch": lambda row: str(row.global_batch_size),
        "rate": lambda row: f"{row.learning_rate:.4g}",
        "time": lambda row: formats.duration(row.train_s),
        "step": lambda row: formats.duration(row.step_time.total_s),
        "p10 to p90": lambda row: formats.duration_range(row.step_p10_s, row.step_p90_s),
        "speed-up": lambda row: formats.times(row.speedup),
        "efficiency": lambda row: formats.percent(row.efficiency),
        "samples/s": lambda row: formats.quantity(row.samples_per_s),
        "forecast": lambda row: formats.quantity(row.forecast_samples_per_s),
        "error": lambda row: formats.signed_percent(row.forecast_error),
        "accuracy": lambda row: formats.percent(row.accuracy, 2),
        # A spread of one seed is no spread.
        "spread": lambda row: formats.spread(row.accuracy_min, row.accuracy_max) if row.has_spread else formats.NOTHING,
        "change": lambda row: formats.NOTHING if row is study.base else formats.points(row.accuracy_change),
        "first step": lambda row: formats.duration(row.time_to_first_step_s),
        "wall": lambda row: formats.duration(row.wall_s),
        "weights": lambda row: "reference" if row is study.base else _SAME[row.same_weights],
    }


_SAME = {None: formats.NOTHING, True: "same", False: "differ"}


def _hashes(study: Study) -> str:
    return ", ".join(f"{digest[:12]} (seed {seed})" for seed, digest in study.base.weights_sha256.items())
