"""The charts of a scaling study."""

from __future__ import annotations

import math
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

from paceline.report import formats
from paceline.report.charts import (
    Axis,
    Chart,
    Series,
    amounts,
    beside_ideal,
    fill_the_grid,
    in_words,
    log_axis,
    series_colors,
    step_parts,
)
from paceline.spec.record import EpochRecord
from paceline.words import listing

if TYPE_CHECKING:
    from paceline.report.study import Study, StudyRow


def study_charts(study: Study) -> list[Chart]:
    """All charts that have data, in the order of the page."""
    counts = [row.devices for row in study.rows]
    # One unit for the whole axis, fit for the longest time.
    longest_s = max(row.train_s for row in study.rows)
    unit, unit_s = ("h", 3600.0) if longest_s >= 7200 else ("min", 60.0) if longest_s >= 120 else ("s", 1.0)
    train_time = amounts(
        counts,
        [row.train_s / unit_s for row in study.rows],
        [formats.duration(row.train_s) for row in study.rows],
        series_colors(len(counts)),
        ("Training time", f"training time ({unit})", "Without start-up and evaluation; the median over seeds."),
    )
    return fill_the_grid(
        [
            _speedup(study) if len(counts) > 2 else None,  # of two device counts the table says it all
            _accuracy(study) if any(row.accuracy is not None for row in study.rows) else None,
            train_time,
            _curves(study, "accuracy", over_time=True),
            _step_time(study),
            _curves(study, "train_loss"),
            _curves(study, "accuracy") or _curves(study, "loss"),
        ]
    )


def _speedup(study: Study) -> Chart:
    measured = Series(
        "line",
        [row.devices for row in study.rows],
        [row.speedup for row in study.rows],
        "measured",
        hover="%{x} devices: %{text}",
        text=[formats.times(row.speedup) for row in study.rows],
    )
    caption = (
        f"Throughput over that of {formats.devices(study.base.devices)}; the dashed line is the ideal, n times as fast "
        f"on n times the devices. No count below {formats.short_percent(study.efficiency_floor)} of it is recommended."
    )
    text = ("Speed-up", "speed-up", caption)
    counts = [row.devices for row in study.rows]
    return beside_ideal(counts, [measured], 1 / study.base.devices, study.recommended.devices, text)


def _step_time(study: Study) -> Chart | None:
    steps, counts = [row.step_time for row in study.rows], [row.devices for row in study.rows]
    if not any(step.total_s for step in steps):
        return None
    exposed = [
        f"{formats.percent(step.exposed_comm_s / step.total_s, 0)} on {formats.devices(count)}"
        for step, count in zip(steps, counts, strict=True)
        if step.exposed_comm_s > 0
    ]
    rest_s = [max(0.0, step.total_s - step.compute_s - step.data_s - step.exposed_comm_s) for step in steps]
    parts = [
        ("compute", "part-compute", [step.compute_s for step in steps]),
        ("data", "part-data", [step.data_s for step in steps]),
        ("exposed communication", "part-communication", [step.exposed_comm_s for step in steps]),
    ]
    if any(left > 0.01 * step.total_s for left, step in zip(rest_s, steps, strict=True)):
        parts.append(("other", "part-other", rest_s))
    hidden = f"Communication that compute does not hide: {listing(exposed) or 'none'}."
    return step_parts(counts, parts, f"The median step. {hidden}")


def _accuracy(study: Study) -> Chart:
    colored = zip(study.rows, series_colors(len(study.rows)), strict=True)
    rows, colors = zip(*((row, color) for row, color in colored if row.accuracy is not None), strict=True)
    runs = [(row, color, run) for row, color in zip(rows, colors, strict=True) for run in row.runs]
    every_run = Series(
        "points",
        [str(row.devices) for row, _, _ in runs],
        [_percent(run.accuracy) for _, _, run in runs],
        color=[color for _, color, _ in runs],
        hover="%{x} devices: %{y:.2f} %",
        size=7,
        faint=True,
    )
    mean = Series(
        "points",
        [str(row.devices) for row in rows],
        [_percent(row.accuracy) for row in rows],
        color=colors,
        low=[_percent(row.accuracy_min) for row in rows],
        high=[_percent(row.accuracy_max) for row in rows],
        hover="%{x} devices: mean %{text}",
        text=[formats.percent(row.accuracy, 2) for row in rows],
        size=13,
    )
    caption = f"Over {len(study.seeds)} seeds: mean, and a bar from the lowest to the highest seed."
    if len(study.seeds) == 1:
        caption = "One seed only: how much of a difference is chance cannot be said."
    series = [every_run, mean]
    if study.base.accuracy is not None and len(rows) > 1:
        limit = 100 * (study.base.accuracy - study.tolerance)
        series.append(Series("reference", [mean.x[0], mean.x[-1]], [limit, limit], hover="limit: %{y:.2f} %"))
        limit_words = f"{formats.short_points(study.tolerance)} below {formats.devices(study.base.devices)}"
        caption += f" The dashed line lies {limit_words}."
    spreads = [
        f"{text} ({formats.spread(row.accuracy_min, row.accuracy_max)})"
        for row, text in zip(rows, mean.text, strict=True)
    ]
    label = "Accuracy. " + in_words([row.devices for row in rows], spreads)
    labels = [f"{row.devices}<br>{text}" for row, text in zip(rows, mean.text, strict=True)]
    return Chart(
        "accuracy",
        "Accuracy",
        caption,
        label,
        series,
        Axis("devices", "category", mean.x, labels),
        Axis("accuracy", suffix=" %"),
    )


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None or not math.isfinite(fraction) else 100 * fraction


# --- over the epochs of training ---

_TITLES = {"train_loss": "Training loss", "loss": "Evaluation loss", "accuracy": "Accuracy"}


def _curves(study: Study, name: str, *, over_time: bool = False) -> Chart | None:
    """The training loss or a metric, by its name in the records: a line per device count, over the range of seeds."""
    is_one_line = study.same_weights and not over_time
    rows = study.rows[:1] if is_one_line else study.rows
    series = []
    for index, (row, color) in enumerate(zip(rows, series_colors(len(rows)), strict=True)):
        points = _curve(row, name, over_time=over_time)
        if points:
            x, values = zip(*points, strict=True)
            count = "all device counts" if is_one_line else formats.devices(row.devices)
            series.append(
                Series(
                    "line",
                    x,
                    [fmean(held) for held in values],
                    count,
                    color,
                    low=[min(held) for held in values] if len(row.runs) > 1 else (),
                    high=[max(held) for held in values] if len(row.runs) > 1 else (),
                    hover=count + (": %{y:.4~g} after %{x:.1f} s" if over_time else ": %{y:.4~g} after epoch %{x}"),
                    size=6 if len(x) <= 30 else 0,
                    style=index,
                )
            )
    if not series:
        return None
    title = _TITLES[name]
    everything = [value for one in series for value in one.y if value is not None]
    low, high = min(everything), max(everything)
    y = Axis(title.lower(), suffix=" %" if name == "accuracy" else "")
    if name != "accuracy" and 0 < 20 * low < high:
        y = log_axis(title.lower(), low, high, 10)
    caption = "One line per device count: the mean over seeds, and the area from the lowest to the highest."
    if is_one_line:
        caption = "One line for all device counts: their curves are equal, bit for bit."
    return Chart(
        f"{name}-{'time' if over_time else 'epochs'}",
        f"{title} over {'training time' if over_time else 'epochs'}",
        caption,
        f"{title}. Last values: {'; '.join(f'{one.name}: {one.y[-1]:.4g}' for one in series)}.",
        series,
        Axis("training time (s)" if over_time else "epoch", from_zero=over_time),
        y,
        legend=True,
    )


def _curve(row: StudyRow, name: str, *, over_time: bool) -> list[tuple[float, list[float]]]:
    """(number of epochs or mean training seconds, value of each run) at the ends of epochs that all runs measured."""
    by_epoch: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for epoch, time_s in zip(run.epochs, accumulate(epoch.train_s for epoch in run.epochs), strict=True):
            value = _value(epoch, name)
            if value is not None:
                by_epoch.setdefault(epoch.epoch, []).append((time_s, value))
    return [
        (fmean(time_s for time_s, _ in found) if over_time else epoch + 1, [value for _, value in found])
        for epoch, found in sorted(by_epoch.items())
        if len(found) == len(row.runs)
    ]


def _value(epoch: EpochRecord, name: str) -> float | None:
    """The training loss or a metric of the evaluation, accuracy in percent; None where it was not measured."""
    if name == "accuracy":
        return _percent(epoch.metrics.get(name))
    value = epoch.train_loss if name == "train_loss" else epoch.metrics.get(name)
    return value if value is not None and math.isfinite(value) else None
