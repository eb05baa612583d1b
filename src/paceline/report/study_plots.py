"""The plots of a scaling study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from paceline.report import formats
from paceline.report.curve_plots import accuracy_over_time, over_epochs
from paceline.report.figure import (
    INK,
    MUTED,
    STEP_PARTS,
    SURFACE,
    SYMBOLS,
    Figure,
    Plot,
    Trace,
    axis,
    dashed,
    error_bars,
    figure,
    fill_the_grid,
    horizontal_line,
    line,
    log_axis,
    points,
    series_color,
    stacked_bar,
)
from paceline.report.study import Study, StudyRow
from paceline.words import listing

_LABEL = {"color": INK, "size": 13}


def study_plots(study: Study) -> list[Plot]:
    """All plots that have data, in the order of the page."""
    # Of one or two device counts the table says all that these would show.
    shows_trend = len(study.rows) > 2
    plots = [
        _speedup(study) if shows_trend else None,
        _efficiency(study) if shows_trend else None,
        _accuracy(study) if study.has_accuracy else None,
        _train_time(study),
        accuracy_over_time(study),
        _step_time(study) if any(row.step_time.total_s > 0 for row in study.rows) else None,
        over_epochs(study, "loss-epochs", "Training loss over epochs", "training loss", "train_loss"),
        over_epochs(study, "accuracy-epochs", "Accuracy over epochs", "accuracy", "accuracy")
        or over_epochs(study, "eval-loss-epochs", "Evaluation loss over epochs", "evaluation loss", "loss"),
    ]
    return fill_the_grid(plot for plot in plots if plot is not None)


def _counts(study: Study) -> list[str]:
    return [str(row.devices) for row in study.rows]


def _devices_axis(study: Study, **style: Any) -> Figure:
    return axis("devices", type="category", fixedrange=True, categoryarray=_counts(study), **style)


def _bars(study: Study, values: Sequence[float | None], labels: Sequence[str], yaxis: Figure, **layout: Any) -> Figure:
    """One labelled bar per device count, each in its colour."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    bars = {
        "type": "bar",
        "x": _counts(study),
        "y": list(values),
        "text": list(labels),
        "textposition": "outside",
        "constraintext": "none",
        "textfont": _LABEL,
        "cliponaxis": False,
        "width": 0.17 * min(3, len(study.rows)),
        "marker": {"color": [series_color(index) for index in range(len(study.rows))]},
        "hovertemplate": "%{x} devices: %{text}<extra></extra>",
    }
    return figure([bars], _devices_axis(study), {"range": [0, 1.16 * top], "fixedrange": True, **yaxis}, **layout)


def _in_words(study: Study, say: Callable[[StudyRow], str]) -> str:
    return "; ".join(f"{formats.devices(row.devices)}: {say(row)}" for row in study.rows) + "."


def _speedup(study: Study) -> Plot:
    base = study.base.devices
    counts = [row.devices for row in study.rows]
    ideal = dashed(
        counts,
        [count / base for count in counts],
        "ideal",
        color=MUTED,
        hover="ideal at %{x} devices: %{y:.2f}x",
    )
    # A linear axis crowds the small counts of a long ladder; on log axes the ideal is a straight line too.
    is_log = counts[-1] >= 16 * counts[0]
    measured = line(
        counts,
        [row.speedup for row in study.rows],
        INK,
        name="measured",
        hover="%{x} devices: %{text}",
        marker={
            "size": 12,
            "color": [series_color(index) for index in range(len(counts))],
            "symbol": [SYMBOLS[index % len(SYMBOLS)] for index in range(len(counts))],
            "line": {"color": SURFACE, "width": 2},
        },
        text=[formats.times(row.speedup) for row in study.rows],
        textposition="bottom center" if is_log else "bottom right",
        textfont=_LABEL,
        cliponaxis=False,
    )
    measured["mode"] += "+text"
    ranges = [row.speedup_range for row in study.rows]
    if all(ranges):
        values = [row.speedup or 0.0 for row in study.rows]
        low, high = zip(*(ends for ends in ranges if ends is not None), strict=True)
        measured["error_y"] = error_bars(values, low, high, INK, thickness=1.5, width=6)
    xaxis = axis("devices", tickvals=counts, ticktext=_counts(study), fixedrange=True)
    if is_log:
        doublings = [2**power for power in range(math.ceil(math.log2(counts[-1] / base)) + 1)]
        xaxis["type"] = "log"
        yaxis = log_axis("speed-up", doublings, [f"{factor}x" for factor in doublings], fixedrange=True)
    else:
        span = counts[-1] - counts[0]
        xaxis["range"] = [counts[0] - 0.08 * span, counts[-1] + 0.2 * span]
        top = 1.1 * max(counts[-1] / base, *((row.speedup_range or (0, row.speedup or 0))[1] for row in study.rows))
        yaxis = axis("speed-up", ticksuffix="x", range=[0, top], fixedrange=True)
    return Plot(
        "speedup",
        "Speed-up",
        f"Samples/s over those on {formats.devices(base)}; the dashed line is the ideal."
        + (" Bars: at steps of the 10th to the 90th percentile." if all(ranges) else ""),
        "Speed-up against devices. " + _in_words(study, lambda row: formats.times(row.speedup)),
        figure([ideal, measured], xaxis, yaxis, showlegend=True),
    )


def _efficiency(study: Study) -> Plot:
    values = [None if row.efficiency is None else 100 * row.efficiency for row in study.rows]
    labels = [formats.percent(row.efficiency) for row in study.rows]
    floor = horizontal_line(100 * study.efficiency_floor)
    return Plot(
        "efficiency",
        "Scaling efficiency",
        "Speed-up divided by the added devices; "
        f"the dashed line is the floor of {formats.short_percent(study.efficiency_floor)}.",
        "Scaling efficiency. " + _in_words(study, lambda row: formats.percent(row.efficiency)),
        _bars(study, values, labels, axis("scaling efficiency", ticksuffix=" %"), **floor),
    )


def _accuracy(study: Study) -> Plot:
    data: list[Trace] = []
    labels: list[Figure] = []
    for index, row in enumerate(study.rows):
        if row.accuracy is not None:
            data += _accuracies(row, series_color(index), SYMBOLS[index % len(SYMBOLS)])
            labels.append(
                {
                    "x": index,  # "4" would be read as the fifth category
                    "y": 100 * (row.accuracy if row.accuracy_max is None else row.accuracy_max),
                    "yshift": 13,
                    "text": f"{100 * row.accuracy:.2f}" if len(study.rows) > 4 else formats.percent(row.accuracy, 2),
                    "showarrow": False,
                    "font": _LABEL,
                }
            )
    caption = f"Over {len(study.seeds)} seeds: mean, and a bar from the lowest to the highest seed."
    if not any(row.has_spread for row in study.rows):
        caption = "One seed only: how much of a difference is chance cannot be said."
    tolerated: dict[str, Any] = {}
    if study.base.accuracy is not None and len(study.rows) > 1:
        tolerated = horizontal_line(100 * (study.base.accuracy - study.tolerance))
        limit = f"{formats.short_points(study.tolerance)} below {formats.devices(study.base.devices)}"
        caption += f" The dashed line lies {limit}."
    return Plot(
        "accuracy",
        "Accuracy",
        caption,
        "Accuracy. " + _in_words(study, _accuracy_in_words),
        figure(
            data,
            _devices_axis(study, range=[-0.5, len(study.rows) - 0.5]),
            axis("accuracy", ticksuffix=" %", fixedrange=True, range=_accuracy_range(study)),
            annotations=labels,
            **tolerated,
        ),
    )


def _accuracies(row: StudyRow, color: str, symbol: str) -> list[Trace]:
    """The mean of one device count; with several seeds each of them, and a bar from the lowest to the highest."""
    assert row.accuracy is not None
    name, value = str(row.devices), 100 * row.accuracy
    hover = f"{formats.devices(row.devices)}: mean %{{y:.2f}} %"
    mean = points([name], [value], color, size=13, hover=hover, symbol=symbol)
    if not row.has_spread or row.accuracy_min is None or row.accuracy_max is None:
        return [mean]
    ends = [100 * row.accuracy_min], [100 * row.accuracy_max]
    seeds = [run for run in row.runs if run.accuracy is not None and math.isfinite(run.accuracy)]
    each = points(
        [name] * len(seeds),
        [100 * (run.accuracy or 0.0) for run in seeds],
        f"{color} 55%",
        size=7,
        hover=[f"seed {run.job.seed}: {100 * (run.accuracy or 0.0):.2f} %" for run in seeds],
    )
    return [each, mean | {"error_y": error_bars([value], *ends, color, thickness=2.5, width=9)}]


def _accuracy_in_words(row: StudyRow) -> str:
    spread = f" (seeds {formats.spread(row.accuracy_min, row.accuracy_max)} %)" if row.has_spread else ""
    return formats.percent(row.accuracy, 2) + spread


def _accuracy_range(study: Study) -> list[float]:
    values = [
        100 * value
        for row in study.rows
        for value in (row.accuracy, row.accuracy_min, row.accuracy_max)
        if value is not None
    ]
    if study.base.accuracy is not None:
        values.append(100 * (study.base.accuracy - study.tolerance))
    margin = 0.2 * (max(values) - min(values)) or 1.0
    return [max(0.0, min(values) - margin), max(values) + margin]


def _train_time(study: Study) -> Plot:
    # One unit for the whole axis, fit for the longest time.
    longest = max(row.train_s for row in study.rows)
    unit, scale = ("h", 3600.0) if longest >= 7200 else ("min", 60.0) if longest >= 120 else ("s", 1.0)
    labels = [formats.duration(row.train_s) for row in study.rows]
    what = "Seconds" if unit == "s" else "Time"
    return Plot(
        "train-time",
        "Training time",
        f"{what} in training steps alone, without start-up and evaluation; the median over seeds.",
        "Training time. " + _in_words(study, lambda row: formats.duration(row.train_s)),
        _bars(study, [row.train_s / scale for row in study.rows], labels, axis(f"training time ({unit})")),
    )


def _step_time(study: Study) -> Plot:
    unit, scale = ("s", 1.0) if max(row.step_time.total_s for row in study.rows) >= 1 else ("ms", 1e3)
    parts = _step_parts(study)
    counts = [formats.devices(row.devices) for row in study.rows]
    data = [
        stacked_bar(
            name,
            token,
            counts,
            [scale * seconds for seconds in values],
            text=[formats.duration(seconds) if seconds > 0 else "" for seconds in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": f"var(--part-{token}-ink)", "size": 12},
            width=0.6,
        )
        for name, token, values in parts
    ]
    exposed = [
        f"{formats.percent(row.step_time.exposed_comm_s / row.step_time.total_s, 0)} on {formats.devices(row.devices)}"
        for row in study.rows
        if row.step_time.total_s > 0 and row.step_time.exposed_comm_s > 0
    ]
    lines = [[scale * values[place] for _, _, values in parts] for place in range(len(study.rows))]
    return Plot(
        "step-time",
        "Where each step's time went",
        f"Communication that compute does not hide: {listing(exposed) if exposed else 'none'}.",
        "Parts of the median step. " + _in_words(study, _step_in_words),
        figure(
            data,
            axis(f"median step ({unit})", fixedrange=True, showgrid=True),
            # The smallest count on top, as in the table.
            axis("", autorange="reversed", fixedrange=True, showgrid=False),
            barmode="stack",
            uniformtext={"mode": "hide", "minsize": 11},
            showlegend=True,
            legend={"traceorder": "normal"},
        ),
        wide=True,
        table=(
            (f"median step ({unit})", *(name for name, _, _ in parts), "total"),
            *(
                (count, *(f"{value:.2f}" for value in (*values, scale * row.step_time.total_s)))
                for row, count, values in zip(study.rows, counts, lines, strict=True)
            ),
        ),
    )


def _step_parts(study: Study) -> list[tuple[str, str, list[float]]]:
    """(name, colour of the style sheet, seconds of each row)."""
    steps = [row.step_time for row in study.rows]
    parts = [(name, color, [getattr(step, part) for step in steps]) for name, color, part in STEP_PARTS]
    rest = [max(0.0, step.total_s - step.data_s - step.compute_s - step.exposed_comm_s) for step in steps]
    if any(left > 0.01 * step.total_s for left, step in zip(rest, steps, strict=True)):
        parts.append(("other", "other", rest))
    return parts


def _step_in_words(row: StudyRow) -> str:
    step = row.step_time
    return (
        f"data {formats.duration(step.data_s)}, compute {formats.duration(step.compute_s)}, "
        f"exposed communication {formats.duration(step.exposed_comm_s)}"
    )
