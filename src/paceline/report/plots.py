"""The plots of a study as plain plotly.js figures.

A colour is written as the name of a CSS variable, "var(--series-1)", optionally with an opacity in percent
behind it, "var(--series-1) 15%"; the page puts in the value that its light or dark scheme gives the name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.report import formats
from paceline.report.study import Study, StudyRow
from paceline.spec.record import EpochRecord, RunRecord

NUM_SERIES = 8
"""Colours the style sheet defines; further device counts begin again, told apart by marker and dash."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "x")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
INK, _MUTED, _GRID = "var(--ink)", "var(--muted)", "var(--grid)"

Figure = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One figure of the page."""

    key: str
    title: str
    caption: str
    """What to see in it, in a sentence."""
    label: str
    """The same numbers in words, for those who do not see it."""
    figure: Figure
    """plotly.js `data` and `layout`."""
    table: tuple[tuple[str, ...], ...] = ()
    """Values too small to be labelled in the plot, head row and head column first."""
    wide: bool = False
    """Takes both columns."""


def study_plots(study: Study) -> list[Plot]:
    """All plots that have data, in the order of the page."""
    several = len(study.rows) > 1
    has_steps = any(row.step_time.total_s > 0 for row in study.rows)
    plots = [
        _speedup(study) if several else None,
        _efficiency(study) if several else None,
        _accuracy(study) if study.has_accuracy else None,
        _train_time(study),
        _throughput(study),
        _accuracy_over_time(study),
        _step_time(study) if has_steps else None,
        _over_epochs(study, "loss-epochs", "Training loss over epochs", "training loss", _train_loss),
        _over_epochs(study, "accuracy-epochs", "Accuracy over epochs", "accuracy", _epoch_accuracy)
        or _over_epochs(study, "eval-loss-epochs", "Evaluation loss over epochs", "evaluation loss", _epoch_loss),
    ]
    return _fill_the_grid([plot for plot in plots if plot is not None])


def _fill_the_grid(plots: list[Plot]) -> list[Plot]:
    """Widen each plot that would leave a hole beside it in a grid of two columns."""
    filled: list[Plot] = []
    column = 0
    for plot in plots:
        if plot.wide and column == 1:
            filled[-1] = dataclasses.replace(filled[-1], wide=True)
        column = 0 if plot.wide else 1 - column
        filled.append(plot)
    if column == 1:
        filled[-1] = dataclasses.replace(filled[-1], wide=True)
    return filled


def series_color(index: int) -> str:
    return f"var(--series-{index % NUM_SERIES + 1})"


def axis_style(title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 13, "color": _MUTED}},
        "color": _MUTED,
        "gridcolor": _GRID,
        "linecolor": "var(--axis)",
        "zeroline": False,
        "automargin": True,
        **more,
    }


def base_layout(xaxis: dict[str, Any], yaxis: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "size": 13,
            "color": INK,
        },
        "margin": {"l": 8, "r": 16, "t": 16, "b": 8},
        "showlegend": False,
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--axis)", "font": {"color": INK}},
        "xaxis": {"showgrid": False, **xaxis},
        "yaxis": yaxis,
        **more,
    }


def _legend() -> dict[str, Any]:
    """Above the plot, where it wraps on a narrow screen."""
    return {
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": INK}},
    }


def _categories(study: Study) -> list[str]:
    return [str(row.devices) for row in study.rows]


def _category_axis(study: Study) -> dict[str, Any]:
    return axis_style("devices", type="category", fixedrange=True, categoryarray=_categories(study))


def _bars(study: Study, values: Sequence[float | None], labels: Sequence[str], yaxis: dict[str, Any]) -> Figure:
    """One labelled bar per device count, each in its colour."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    bars = {
        "type": "bar",
        "x": _categories(study),
        "y": list(values),
        "text": list(labels),
        "textposition": "outside",
        "constraintext": "none",
        "textfont": {"color": INK, "size": 13},
        "cliponaxis": False,
        "width": 0.17 * min(3, len(study.rows)),
        "marker": {"color": [series_color(index) for index in range(len(study.rows))]},
        "hovertemplate": "%{x} devices: %{text}<extra></extra>",
    }
    yaxis = {"range": [0, 1.16 * top], "fixedrange": True, **yaxis}
    return {"data": [bars], "layout": base_layout(_category_axis(study), yaxis)}


def _level(value: float) -> dict[str, Any]:
    """A dashed line across the plot at `value`."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"shapes": [{**line, "line": {"color": INK, "width": 1.5, "dash": "dash"}}]}


def _said(study: Study, say: Callable[[StudyRow], str]) -> str:
    return "; ".join(f"{formats.devices(row.devices)}: {say(row)}" for row in study.rows) + "."


def _speedup(study: Study) -> Plot:
    base = study.base.devices
    counts = [row.devices for row in study.rows]
    # A linear axis crowds the small counts of a long ladder; on log axes the ideal is a straight line too.
    kind = "log" if counts[-1] >= 16 * counts[0] else "linear"
    ideal = {
        "type": "scatter",
        "mode": "lines",
        "x": counts,
        "y": [count / base for count in counts],
        "line": {"color": _MUTED, "width": 1.5, "dash": "dash"},
        "name": "ideal",
        "hovertemplate": "ideal at %{x} devices: %{y:.2f}x<extra></extra>",
    }
    measured = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "x": counts,
        "y": [row.speedup for row in study.rows],
        "text": [formats.times(row.speedup) for row in study.rows],
        "textposition": "bottom right" if kind == "linear" else "bottom center",
        "textfont": {"color": INK, "size": 13},
        "cliponaxis": False,
        "line": {"color": INK, "width": 2},
        "marker": {
            "size": 12,
            "color": [series_color(index) for index in range(len(counts))],
            "symbol": [SYMBOLS[index % len(SYMBOLS)] for index in range(len(counts))],
            "line": {"color": "var(--surface)", "width": 2},
        },
        "name": "measured",
        "hovertemplate": "%{x} devices: %{text}<extra></extra>",
    }
    span = counts[-1] - counts[0]
    xaxis = axis_style("devices", tickvals=counts, ticktext=_categories(study), type=kind, fixedrange=True)
    yaxis = axis_style("speed-up", type=kind, fixedrange=True)
    if kind == "log":
        doublings = [2**power for power in range(math.ceil(math.log2(counts[-1] / base)) + 1)]
        yaxis |= {"tickvals": doublings, "ticktext": [f"{factor}x" for factor in doublings]}
    else:
        yaxis["ticksuffix"] = "x"
        xaxis["range"] = [counts[0] - 0.08 * span, counts[-1] + 0.2 * span]
        yaxis["range"] = [0, 1.1 * max(counts[-1] / base, *(row.speedup or 0 for row in study.rows))]
    return Plot(
        "speedup",
        "Speed-up",
        f"Training time on {formats.devices(base)} over the time on more; the dashed line is the ideal.",
        "Speed-up against devices. " + _said(study, lambda row: formats.times(row.speedup)),
        {"data": [ideal, measured], "layout": base_layout(xaxis, yaxis, **_legend())},
    )


def _efficiency(study: Study) -> Plot:
    labels = [formats.percent(row.efficiency) for row in study.rows]
    values = [None if row.efficiency is None else 100 * row.efficiency for row in study.rows]
    figure = _bars(study, values, labels, axis_style("scaling efficiency", ticksuffix=" %"))
    figure["layout"] |= _level(100 * study.efficiency_floor)
    return Plot(
        "efficiency",
        "Scaling efficiency",
        "Speed-up divided by the added devices; "
        f"the dashed line is the floor of {formats.short_percent(study.efficiency_floor)}.",
        "Scaling efficiency. " + _said(study, lambda row: formats.percent(row.efficiency)),
        figure,
    )


def _accuracy(study: Study) -> Plot:
    data: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for index, row in enumerate(study.rows):
        if row.accuracy is None:
            continue
        name, color = str(row.devices), series_color(index)
        seeds = [run for run in row.runs if run.accuracy is not None and math.isfinite(run.accuracy)]
        mean: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "x": [name],
            "y": [100 * row.accuracy],
            "marker": {"size": 13, "color": color, "symbol": SYMBOLS[index % len(SYMBOLS)]},
            "hovertemplate": f"{formats.devices(row.devices)}: mean %{{y:.2f}} %<extra></extra>",
        }
        if row.has_spread and row.accuracy_min is not None and row.accuracy_max is not None:
            mean["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [100 * (row.accuracy_max - row.accuracy)],
                "arrayminus": [100 * (row.accuracy - row.accuracy_min)],
                "color": color,
                "thickness": 2.5,
                "width": 9,
            }
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [name] * len(seeds),
                    "y": [100 * (run.accuracy or 0.0) for run in seeds],
                    "marker": {"size": 7, "color": f"{color} 55%", "symbol": "circle"},
                    "text": [f"seed {run.job.seed}" for run in seeds],
                    "hovertemplate": "%{text}: %{y:.2f} %<extra></extra>",
                }
            )
        data.append(mean)
        labels.append(
            {
                "x": name,
                "y": 100 * (row.accuracy if row.accuracy_max is None else row.accuracy_max),
                "yshift": 13,
                "text": f"{100 * row.accuracy:.2f}" if len(study.rows) > 4 else formats.percent(row.accuracy, 2),
                "showarrow": False,
                "font": {"color": INK, "size": 13},
            }
        )
    xaxis = _category_axis(study) | {"range": [-0.5, len(study.rows) - 0.5]}
    layout = base_layout(
        xaxis,
        axis_style("accuracy", ticksuffix=" %", fixedrange=True, range=_accuracy_range(study)),
        annotations=labels,
    )
    caption = f"Over {len(study.seeds)} seeds: mean, and a bar from the lowest to the highest seed."
    if not any(row.has_spread for row in study.rows):
        caption = "One seed only: how much of a difference is chance cannot be said."
    if study.base.accuracy is not None and len(study.rows) > 1:
        layout |= _level(100 * (study.base.accuracy - study.tolerance))
        limit = f"{formats.short_points(study.tolerance)} below {formats.devices(study.base.devices)}"
        caption += f" The dashed line lies {limit}."
    return Plot(
        "accuracy",
        "Accuracy",
        caption,
        "Accuracy. "
        + _said(
            study,
            lambda row: (
                formats.percent(row.accuracy, 2)
                + (f" (seeds {formats.spread(row.accuracy_min, row.accuracy_max)} %)" if row.has_spread else "")
            ),
        ),
        {"data": data, "layout": layout},
    )


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
    return Plot(
        "train-time",
        "Training time",
        "Seconds in training steps alone, without start-up and evaluation; the median over seeds."
        if unit == "s"
        else "Time in training steps alone, without start-up and evaluation; the median over seeds.",
        "Training time. " + _said(study, lambda row: formats.duration(row.train_s)),
        _bars(
            study,
            [row.train_s / scale for row in study.rows],
            [formats.duration(row.train_s) for row in study.rows],
            axis_style(f"training time ({unit})"),
        ),
    )


def _throughput(study: Study) -> Plot:
    return Plot(
        "throughput",
        "Throughput",
        "Training samples a second over all devices, from the median step.",
        "Throughput in samples a second. " + _said(study, lambda row: formats.quantity(row.samples_per_s)),
        _bars(
            study,
            [row.samples_per_s for row in study.rows],
            [formats.quantity(row.samples_per_s) for row in study.rows],
            axis_style("samples/s", tickformat="~s"),
        ),
    )


def _step_time(study: Study) -> Plot:
    rows = study.rows
    longest = max(row.step_time.total_s for row in rows)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    parts: list[tuple[str, str, list[float]]] = [
        ("compute", "compute", [row.step_time.compute_s for row in rows]),
        ("data", "data", [row.step_time.data_s for row in rows]),
        ("exposed communication", "comm", [row.step_time.exposed_comm_s for row in rows]),
    ]
    rest = [
        max(
            0.0,
            row.step_time.total_s - row.step_time.data_s - row.step_time.compute_s - row.step_time.exposed_comm_s,
        )
        for row in rows
    ]
    if any(left > 0.01 * row.step_time.total_s for left, row in zip(rest, rows, strict=True)):
        parts.append(("other", "other", rest))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [formats.devices(row.devices) for row in rows],
            "x": [scale * seconds for seconds in values],
            "text": [formats.duration(seconds) if seconds > 0 else "" for seconds in values],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": f"var(--part-{token}-ink)", "size": 12},
            "width": 0.6,
            "marker": {"color": f"var(--part-{token})", "line": {"color": "var(--surface)", "width": 1.5}},
            "hovertemplate": "%{y}, " + name + ": %{text}<extra></extra>",
        }
        for name, token, values in parts
    ]
    layout = base_layout(
        axis_style(f"median step ({unit})", fixedrange=True, showgrid=True),
        # The smallest count on top, as in the table.
        axis_style("", autorange="reversed", fixedrange=True, showgrid=False),
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 11},
        **_legend(),
    )
    layout["legend"]["traceorder"] = "normal"

    def share(row: StudyRow) -> float:
        return row.step_time.exposed_comm_s / row.step_time.total_s if row.step_time.total_s > 0 else 0.0

    def in_unit(seconds: float) -> str:
        return f"{scale * seconds:.2f}"

    waiting = [f"{formats.percent(share(row), 0)} on {formats.devices(row.devices)}" for row in rows if share(row) > 0]
    caption = "Communication that compute does not hide"
    return Plot(
        "step-time",
        "Where each step's time went",
        f"{caption}: {formats.listing(waiting)}." if waiting else f"{caption}: none.",
        "Parts of the median step. "
        + _said(
            study,
            lambda row: ", ".join(
                [
                    f"data {formats.duration(row.step_time.data_s)}",
                    f"compute {formats.duration(row.step_time.compute_s)}",
                    f"exposed communication {formats.duration(row.step_time.exposed_comm_s)}",
                ]
            ),
        ),
        {"data": data, "layout": layout},
        wide=True,
        table=(
            (f"median step ({unit})", *(name for name, _, _ in parts), "total"),
            *(
                (
                    formats.devices(row.devices),
                    *(in_unit(values[index]) for _, _, values in parts),
                    in_unit(row.step_time.total_s),
                )
                for index, row in enumerate(rows)
            ),
        ),
    )


Measure = Callable[[EpochRecord], float | None]


def _train_loss(epoch: EpochRecord) -> float | None:
    return _finite(epoch.train_loss)


def _epoch_loss(epoch: EpochRecord) -> float | None:
    return _finite(epoch.metrics.get("loss"))


def _epoch_accuracy(epoch: EpochRecord) -> float | None:
    accuracy = _finite(epoch.metrics.get("accuracy"))
    return None if accuracy is None else 100 * accuracy


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class _Point:
    """One epoch over the seeds of a device count."""

    epoch: int
    time_s: float
    """Mean training time up to its end."""
    mean: float
    low: float
    high: float


def _curve(row: StudyRow, measure: Measure) -> list[_Point]:
    """The epochs at which every run of the row was measured."""
    by_epoch: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for epoch, time_s, value in _measured(run, measure):
            by_epoch.setdefault(epoch, []).append((time_s, value))
    return [
        _Point(epoch, fmean(time_s for time_s, _ in found), fmean(v for _, v in found), min(values), max(values))
        for epoch, found in sorted(by_epoch.items())
        if len(found) == len(row.runs) and (values := [value for _, value in found])
    ]


def _measured(run: RunRecord, measure: Measure) -> list[tuple[int, float, float]]:
    """(epoch, training time up to its end, value) of the epochs that have a value."""
    found, time_s = [], 0.0
    for epoch in run.epochs:
        time_s += epoch.train_s
        value = measure(epoch)
        if value is not None:
            found.append((epoch.epoch, time_s, value))
    return found


def _lines(study: Study, curves: list[list[_Point]], over_time: bool) -> list[dict[str, Any]]:
    """One line per device count, with a band from the lowest to the highest seed where there are several."""
    data: list[dict[str, Any]] = []
    for index, (row, curve) in enumerate(zip(study.rows, curves, strict=True)):
        if not curve:
            continue
        color, name = series_color(index), formats.devices(row.devices)
        x = [point.time_s if over_time else point.epoch for point in curve]
        # Where all device counts give the same curve the lines lie on one another: wide below, narrow on top.
        hidden = study.same_weights and not over_time
        width = 2 + 3.0 * (len(study.rows) - 1 - index) if hidden else 2.25
        if len(row.runs) > 1 and not (hidden and index > 0):
            edge = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0, "color": color}}
            quiet = {"hoverinfo": "skip", "showlegend": False, "legendgroup": name}
            data.append({**edge, **quiet, "y": [point.high for point in curve]})
            fill = {"fill": "tonexty", "fillcolor": f"{color} 16%"}
            data.append({**edge, **quiet, **fill, "y": [point.low for point in curve]})
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(curve) <= 30 else "lines",
                "name": name,
                "legendgroup": name,
                "x": x,
                "y": [point.mean for point in curve],
                "line": {
                    "color": color,
                    "width": width,
                    "dash": "solid" if hidden else _DASHES[index % len(_DASHES)],
                },
                "marker": {"size": 6 + (width if hidden else 0), "symbol": SYMBOLS[index % len(SYMBOLS)]},
                "hovertemplate": name
                + (": %{y:.4~g} after %{x:.1f} s" if over_time else ": %{y:.4~g} after epoch %{x}")
                + "<extra></extra>",
            }
        )
    return data


def _curves_caption(study: Study, over_time: bool = False) -> str:
    if study.same_weights and not over_time:
        return "The curves of all device counts lie on one another: they learn the same, bit for bit."
    if len(study.seeds) > 1:
        return "Mean over seeds; the band reaches from the lowest to the highest."
    return "One line per device count."


def _over_epochs(study: Study, key: str, title: str, unit: str, measure: Measure) -> Plot | None:
    curves = [_curve(row, measure) for row in study.rows]
    if not any(curves):
        return None
    values = [point.mean for curve in curves for point in curve]
    yaxis = axis_style(unit, **({"ticksuffix": " %"} if measure is _epoch_accuracy else {}))
    if key.startswith("loss") and min(values) > 0 and max(values) > 20 * min(values):
        ticks = _log_ticks(min(values), max(values))
        yaxis |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    longest = max(point.epoch for curve in curves for point in curve)
    xaxis = axis_style("epoch", **({"dtick": 1} if longest <= 12 else {}))
    return Plot(
        key,
        title,
        _curves_caption(study),
        f"{title}. Last value: " + _last_values(study, curves),
        {"data": _lines(study, curves, over_time=False), "layout": base_layout(xaxis, yaxis, **_legend())},
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of every decade that the values touch; only 1 when there are many decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    return [digit * 10.0**power for power in range(first, last + 1) for digit in digits]


def _accuracy_over_time(study: Study) -> Plot | None:
    curves = [_curve(row, _epoch_accuracy) for row in study.rows]
    if not any(curves):
        return None
    return Plot(
        "accuracy-time",
        "Accuracy over training time",
        "How soon each device count gets there. " + _curves_caption(study, over_time=True),
        "Accuracy in percent over training time in seconds. Last value: " + _last_values(study, curves),
        {
            "data": _lines(study, curves, over_time=True),
            "layout": base_layout(
                axis_style("training time (s)", rangemode="tozero"),
                axis_style("accuracy", ticksuffix=" %"),
                **_legend(),
            ),
        },
    )


def _last_values(study: Study, curves: list[list[_Point]]) -> str:
    said = [
        f"{formats.devices(row.devices)}: {curve[-1].mean:.4g}"
        for row, curve in zip(study.rows, curves, strict=True)
        if curve
    ]
    return "; ".join(said) + "."
