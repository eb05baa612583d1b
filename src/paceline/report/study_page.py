"""A study as a table for the terminal and as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomli_w
from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report import formats
from paceline.report.charts import series_colors
from paceline.report.page import render
from paceline.report.study_charts import study_charts
from paceline.report.tables import MARK, Grid, grid_of
from paceline.spec.job import Job
from paceline.words import listing, number_of

if TYPE_CHECKING:
    from paceline.report.study import Study

_SAME = {None: formats.NOTHING, True: "same", False: "differ"}


def study_table(study: Study) -> RenderableType:
    """Devices x time x speed-up x efficiency x accuracy, the recommended row marked, the verdict below."""
    found = study.recommendation
    lines = [found.verdict, found.reason, *found.rejected.values()]
    if study.same_weights:
        counts = listing([str(row.devices) for row in study.rows])
        hashes = ", ".join(f"{digest[:12]} (seed {seed})" for seed, digest in study.base.weights_sha256.items())
        lines.append(f"Same weights bit for bit on {counts} devices: {hashes}")
    legend = f"{MARK} recommended\n" if len(study.rows) > 1 else ""
    return Group(_grid(study), Text(legend, style="dim"), *map(Text, lines))


def _grid(study: Study) -> Grid:
    base, several = study.base, len(study.rows) > 1
    grows = study.grow == "batch"
    columns = [
        ("devices", lambda row: str(row.devices)),
        ("batch", lambda row: str(row.global_batch_size) if grows else ""),
        ("rate", lambda row: f"{row.learning_rate:.4g}" if grows else ""),
        ("time", lambda row: formats.duration(row.train_s)),
        ("step", lambda row: formats.duration(row.step_time.total_s)),
        ("p10\N{EN DASH}p90", lambda row: formats.duration_range(row.step_p10_s, row.step_p90_s)),
        ("samples/s", lambda row: formats.quantity(row.samples_per_s)),
        ("speed-up", lambda row: formats.times(row.speedup)),
        ("efficiency", lambda row: formats.percent(row.efficiency)),
        ("accuracy", lambda row: formats.percent(row.accuracy, 2)),
        # A spread of one seed is no spread.
        ("spread (%)", lambda row: formats.spread(row.accuracy_min, row.accuracy_max) if row.has_spread else ""),
        ("change (points)", lambda row: formats.NOTHING if row is base else formats.points(row.accuracy_change)),
        ("forecast", lambda row: formats.quantity(row.forecast_samples_per_s)),
        ("error", lambda row: formats.signed_percent(row.forecast_error)),
        ("first step", lambda row: formats.duration(row.time_to_first_step_s)),
        ("wall", lambda row: formats.duration(row.wall_s)),
        (
            "weights",
            lambda row: "" if grows or not several else "reference" if row is base else _SAME[row.same_weights],
        ),
    ]
    return grid_of(
        columns,
        study.rows,
        recommended=study.rows.index(study.recommended) if several else None,  # one row alone is no choice
        colors=series_colors(len(study.rows)),
        least_important=(
            *("weights", "p10\N{EN DASH}p90", "wall", "first step", "step", "rate", "batch", "samples/s", "spread (%)"),
            *("error", "forecast", "change (points)", "time"),
        ),
    )


def study_page(study: Study) -> str:
    """The whole page."""
    plan = study.base.runs[0].plan
    return render(
        "study.html",
        study=study,
        best=study.recommended,
        several=len(study.rows) > 1,
        device_kind=plan.device_kind,
        threads=number_of(plan.threads_per_worker, "thread"),
        grid=_grid(study),
        charts=study_charts(study),
        notes=_notes(study),
        job_text=job_toml(study.job),
        environment=_environment(study),
    )


def _notes(study: Study) -> dict[str, str]:
    """Each note of the runs, and of which it is."""
    held = {note: [run for run in study.records if note in run.notes] for run in study.records for note in run.notes}
    return {
        note: "All runs"
        if len(runs) == len(study.records)
        else listing([f"{formats.devices(run.world_size)} (seed {run.job.seed})" for run in runs])
        for note, runs in held.items()
    }


def _environment(study: Study) -> list[tuple[str, str]]:
    """(key, value); where runs disagree, all values, because such a comparison needs a second look."""
    keys = dict.fromkeys(key for run in study.records for key in run.environment)
    values = {key: dict.fromkeys(run.environment.get(key, "not known") for run in study.records) for key in keys}
    return [
        (key, next(iter(found)) if len(found) == 1 else "differs between runs: " + "; ".join(found))
        for key, found in values.items()
    ]


def job_toml(job: Job) -> str:
    """A job as a TOML file that `load_job` reads back to the same job; unset keys are left out."""
    return tomli_w.dumps(_without_nothing(job.to_mapping()))


def _without_nothing(value: Any) -> Any:
    """TOML has no null: what is not set is left out."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    return [_without_nothing(item) for item in value if item is not None] if isinstance(value, list) else value
