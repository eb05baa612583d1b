"""A study as a table for the terminal, as one HTML page that needs nothing but a browser, and as files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.errors import file_problems
from paceline.report import formats
from paceline.report.charts import Axis, Chart, Series, beside_ideal, in_words, series_colors, step_parts
from paceline.report.page import render
from paceline.report.tables import MARK, Grid, grid_of
from paceline.spec.job import flattened
from paceline.words import listing, number_of

if TYPE_CHECKING:
    from paceline.report.study import Study, StudyRow


def study_table(study: Study) -> RenderableType:
    """Devices x time x speed-up x efficiency x accuracy, the recommended row marked, the verdict below."""
    found = study.recommendation
    lines = [found.verdict, found.reason, *found.rejected.values()]
    if study.same_weights:
        lines.append("Every number of devices ended with the same weights, bit for bit.")
    legend = f"{MARK} recommended\n" if len(study.rows) > 1 else ""
    return Group(_grid(study), Text(legend, style="dim"), *map(Text, lines))


def _grid(study: Study) -> Grid:
    base, several = study.base, len(study.rows) > 1
    grows = study.grow == "batch"
    columns = [
        ("devices", lambda row: str(row.devices)),
        ("batch", lambda row: str(row.runs[0].job.global_batch_size) if grows else ""),
        ("time", lambda row: formats.duration(row.train_s)),
        ("step", lambda row: formats.duration(row.step_time.total_s)),
        ("samples/s", lambda row: formats.quantity(row.samples_per_s)),
        ("speed-up", lambda row: formats.times(row.speedup)),
        ("efficiency", lambda row: formats.percent(row.efficiency)),
        ("accuracy", lambda row: formats.percent(row.accuracy, 2)),
        # A spread of one seed is no spread.
        ("spread (%)", lambda row: formats.spread(row.accuracy_min, row.accuracy_max) if len(row.runs) > 1 else ""),
        ("change (points)", lambda row: formats.NOTHING if row is base else formats.points(row.accuracy_change)),
        ("forecast", lambda row: formats.quantity(row.forecast_samples_per_s)),
        ("error (%)", lambda row: formats.points(row.forecast_error, 1)),
        ("first step", lambda row: formats.duration(row.time_to_first_step_s)),
        ("wall", lambda row: formats.duration(row.wall_s)),
    ]
    return grid_of(
        columns,
        study.rows,
        recommended=study.rows.index(study.recommended) if several else None,  # one row alone is no choice
        colors=series_colors(len(study.rows)),
        least_important=(
            *("wall", "first step", "step", "batch", "samples/s", "spread (%)"),
            *("error (%)", "forecast", "change (points)", "time"),
        ),
    )


def study_page(study: Study) -> str:
    """The whole page."""
    first = study.base.runs[0]
    plan, job = first.plan, flattened(first.job.to_mapping())
    notes: dict[str, list[str]] = {}
    for run in study.records:
        for note in dict.fromkeys(run.notes):
            notes.setdefault(note, []).append(f"{formats.devices(run.world_size)} (seed {run.job.seed})")
    # Where runs disagree, all values, because such a comparison needs a second look.
    keys = dict.fromkeys(key for run in study.records for key in run.environment)
    environment = {key: dict.fromkeys(run.environment.get(key, "not known") for run in study.records) for key in keys}
    return render(
        "study.html",
        study=study,
        best=study.recommended,
        several=len(study.rows) > 1,
        device_kind=plan.device_kind,
        threads=number_of(plan.threads_per_worker, "thread"),
        grid=_grid(study),
        charts=_charts(study),
        notes={note: "All runs" if len(of) == len(study.records) else listing(of) for note, of in notes.items()},
        job=[f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in job.items() if value is not None],
        environment={key: " / ".join(values) for key, values in environment.items()},
    )


# --- charts ---


def _charts(study: Study) -> list[Chart]:
    """All that have data, in the order of the page."""
    charts = [
        _speedup(study) if len(study.rows) > 1 else None,
        _accuracy(study) if any(row.accuracy is not None for row in study.rows) else None,
        _curves(study, "accuracy", "Accuracy") or _curves(study, "loss", "Evaluation loss"),
        _curves(study, "train_loss", "Training loss"),
        _step_time(study) if any(row.step_time.total_s for row in study.rows) else None,
    ]
    return [chart for chart in charts if chart]


def _speedup(study: Study) -> Chart:
    counts, speedups = [row.devices for row in study.rows], [row.speedup for row in study.rows]
    measured = Series("line", counts, speedups, "measured", text=[formats.times(speedup) for speedup in speedups])
    caption = (
        f"Throughput over that of {formats.devices(study.base.devices)}; the dashed line is the ideal, n times as fast "
        f"on n times the devices. No count below {formats.short_percent(study.efficiency_floor)} of it is recommended."
    )
    text = ("Speed-up", "speed-up", caption)
    return beside_ideal(measured, 1 / study.base.devices, study.recommended.devices, text)


def _step_time(study: Study) -> Chart:
    steps = [row.step_time for row in study.rows]
    rest_s = [max(0.0, step.total_s - step.compute_s - step.data_s - step.exposed_comm_s) for step in steps]
    parts = [
        ("compute", "part-compute", [step.compute_s for step in steps]),
        ("data", "part-data", [step.data_s for step in steps]),
        ("exposed communication", "part-communication", [step.exposed_comm_s for step in steps]),
        ("other", "part-other", rest_s),
    ]
    caption = "The median step. Exposed communication is what compute does not hide."
    return step_parts([row.devices for row in study.rows], parts, caption)


def _accuracy(study: Study) -> Chart:
    colored = zip(study.rows, series_colors(len(study.rows)), strict=True)
    rows, colors = zip(*((row, color) for row, color in colored if row.accuracy is not None), strict=True)
    texts = [formats.percent(row.accuracy, 2) for row in rows]
    names = [f"{row.devices}<br>{text}" for row, text in zip(rows, texts, strict=True)]
    mean, low, high = (
        [100 * getattr(row, name) for row in rows] for name in ("accuracy", "accuracy_min", "accuracy_max")
    )
    series = [Series("points", names, mean, color=colors, low=low, high=high)]
    caption = f"Over {len(study.seeds)} seeds: mean, and a bar from the lowest to the highest seed."
    if len(study.seeds) == 1:
        caption = "One seed only: how much of a difference is chance cannot be said."
    if study.base.accuracy is not None and len(rows) > 1:
        limit = 100 * (study.base.accuracy - study.tolerance)
        series.append(Series("reference", [names[0], names[-1]], [limit, limit]))
        below = f"{formats.short_points(study.tolerance)} below {formats.devices(study.base.devices)}"
        caption += f" The dashed line lies {below}."
    label = "Accuracy. " + in_words([row.devices for row in rows], texts)
    x, y = Axis("devices", "category", names), Axis("accuracy", suffix=" %")
    return Chart("Accuracy", caption, label, series, x, y)


def _curves(study: Study, name: str, title: str) -> Chart | None:
    """The training loss or a metric over training time, by its name in the records: a line per device count."""
    series = []
    for row, color in zip(study.rows, series_colors(len(study.rows)), strict=True):
        times_s, values = _curve(row, name)
        if times_s:
            mean, low, high = ([of(held) for held in values] for of in (fmean, min, max))
            series.append(Series("line", times_s, mean, formats.devices(row.devices), color, low, high))
    if not series:
        return None
    caption = "One line per device count: the mean over seeds, and the area from the lowest to the highest."
    label = f"{title}. Last values: {'; '.join(f'{one.name}: {one.y[-1]:.4g}' for one in series)}."
    y = Axis(title.lower(), suffix=" %" if name == "accuracy" else "")
    return Chart(f"{title} over training time", caption, label, series, Axis("training time (s)", from_zero=True), y)


def _curve(row: StudyRow, name: str) -> tuple[list[float], list[list[float]]]:
    """Mean training seconds, and the value of each run, at the ends of epochs that all runs measured."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for run in row.runs:
        for epoch, time_s in zip(run.epochs, accumulate(epoch.train_s for epoch in run.epochs), strict=True):
            value = epoch.train_loss if name == "train_loss" else epoch.metrics.get(name, math.nan)
            if math.isfinite(value):
                found[epoch.epoch].append((time_s, 100 * value if name == "accuracy" else value))
    whole = [pairs for _, pairs in sorted(found.items()) if len(pairs) == len(row.runs)]
    return [fmean(time_s for time_s, _ in pairs) for pairs in whole], [[value for _, value in pairs] for pairs in whole]


# --- files ---


def write_study(study: Study, out: Path) -> None:
    """Write scaling.json (everything), scaling.csv (one line per run) and report.html into the folder `out`, which is
    made. Times are in seconds, accuracies in [0, 1]; null, or an empty cell, is a number that was not measured. Raises
    `PacelineError` where the folder cannot be made or written to."""
    everything = asdict(study) | {"same_weights": study.same_weights}
    everything["recommended_devices"] = study.recommendation.devices
    everything["job"] = asdict(study.base.runs[0].job)
    for run in (run for row in everything["rows"] for run in row["runs"]):
        job = run.pop("job")  # what differs in a study stays
        run |= {key: job[key] for key in ("name", "seed", "global_batch_size")}
    lines = [
        {"name": run.job.name, "devices": run.world_size, "seed": run.job.seed}
        | {"global_batch_size": run.job.global_batch_size, "learning_rate": run.job.optim.lr * run.job.lr_scale}
        | run.summary()
        | {"train_loss": run.train_loss, "train_s": run.train_s}
        | {f"step_{part}": seconds for part, seconds in vars(run.step_time).items()}
        | {"recommended": int(run.world_size == study.recommendation.devices)}
        for run in study.records
    ]
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_plain(lines))
    text = json.dumps(_plain(everything), indent=2) + "\n"
    files = {"scaling.json": text, "scaling.csv": table.getvalue(), "report.html": study.page()}
    with file_problems(f"The report cannot be written into '{out}'", remedy="name another folder"):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_text(content, encoding="utf-8", newline="\n")


def _plain(value: Any) -> Any:
    """What JSON can hold: a value that is not finite, such as the loss of a run that diverged, becomes null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
