"""The plots of a scaling study that follow training: loss and accuracy over epochs and over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from paceline.report import formats
from paceline.report.figure import (
    SYMBOLS,
    Plot,
    Trace,
    axis,
    figure,
    interval,
    line,
    log_axis,
    log_ticks,
    series_color,
)
from paceline.report.study import Study, StudyRow
from paceline.spec.record import EpochRecord

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")


def _value(epoch: EpochRecord, name: str) -> float | None:
    """The training loss or a metric of the evaluation, accuracy in percent; None where it was not measured."""
    value = epoch.train_loss if name == "train_loss" else epoch.metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return 100 * value if name == "accuracy" else value


@dataclass(frozen=True)
class _Point:
    """One epoch over the seeds of a device count."""

    epoch: int
    time_s: float
    """Mean training time up to its end."""
    mean: float
    low: float
    high: float


def _curve(row: StudyRow, name: str) -> list[_Point]:
    """The epochs at which every run of the row was measured."""
    by_epoch: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for epoch, time_s in zip(run.epochs, accumulate(epoch.train_s for epoch in run.epochs), strict=True):
            if (value := _value(epoch, name)) is not None:
                by_epoch.setdefault(epoch.epoch, []).append((time_s, value))
    return [
        _Point(epoch, fmean(time_s for time_s, _ in found), fmean(values), min(values), max(values))
        for epoch, found in sorted(by_epoch.items())
        if len(found) == len(row.runs) and (values := [value for _, value in found])
    ]


def _curves(study: Study, curves: list[list[_Point]], over_time: bool) -> list[Trace]:
    """One line per device count, over the range from the lowest to the highest seed where there are several."""
    data: list[Trace] = []
    # Where all device counts give the same curve, one line stands for all.
    is_same = study.same_weights and not over_time
    for index, (row, curve) in enumerate(zip(study.rows[:1] if is_same else study.rows, curves, strict=not is_same)):
        if not curve:
            continue
        color, name = series_color(index), "all device counts" if is_same else formats.devices(row.devices)
        x = [point.time_s if over_time else point.epoch for point in curve]
        if len(row.runs) > 1:
            low, high = [point.low for point in curve], [point.high for point in curve]
            data.append(interval(x, low, high, color, legendgroup=name))
        marker = {"size": 6, "symbol": SYMBOLS[index % len(SYMBOLS)]}
        data.append(
            line(
                x,
                [point.mean for point in curve],
                color,
                name=name,
                legendgroup=name,
                width=2.25,
                dash=_DASHES[index % len(_DASHES)],
                marker=marker if len(curve) <= 30 else None,
                hover=name + (": %{y:.4~g} after %{x:.1f} s" if over_time else ": %{y:.4~g} after epoch %{x}"),
            )
        )
    return data


def _curves_caption(study: Study, curves: Sequence[Sequence[_Point]], over_time: bool = False) -> str:
    if study.same_weights and not over_time:
        return "One line for all device counts: their curves are equal, bit for bit."
    said = "One line per device count."
    if len(study.seeds) > 1:
        said = "Mean over seeds; the coloured area reaches from the lowest to the highest."
    if over_time or len(curves) < 2:
        return said
    return f"{said} {_difference(curves)}"


def _difference(curves: Sequence[Sequence[_Point]]) -> str:
    """How far apart the curves of all device counts are, by their means."""
    by_epoch: dict[int, list[float]] = {}
    for curve in curves:
        for point in curve:
            by_epoch.setdefault(point.epoch, []).append(point.mean)
    gaps = {epoch: max(means) - min(means) for epoch, means in by_epoch.items() if len(means) > 1}
    if not gaps:
        return ""
    if max(gaps.values()) == 0:
        return "The curves are equal."
    widest = max(gaps, key=lambda epoch: gaps[epoch])
    return f"They differ by at most {gaps[widest]:.2g}, after epoch {widest}."


def over_epochs(study: Study, key: str, title: str, unit: str, name: str) -> Plot | None:
    """The training loss or a metric, by its name in the records."""
    curves = [_curve(row, name) for row in study.rows]
    if not any(curves):
        return None
    values = [point.mean for curve in curves for point in curve]
    yaxis = axis(unit, **({"ticksuffix": " %"} if name == "accuracy" else {}))
    if key.startswith("loss") and min(values) > 0 and max(values) > 20 * min(values):
        yaxis = log_axis(unit, log_ticks(min(values), max(values), most_decades=3))
    longest = max(point.epoch for curve in curves for point in curve)
    xaxis = axis("epoch", **({"dtick": 1} if longest <= 12 else {}))
    return Plot(
        key,
        title,
        _curves_caption(study, curves).strip(),
        f"{title}. Last value: " + _last_values(study, curves),
        figure(_curves(study, curves, over_time=False), xaxis, yaxis, showlegend=True),
    )


def accuracy_over_time(study: Study) -> Plot | None:
    curves = [_curve(row, "accuracy") for row in study.rows]
    if not any(curves):
        return None
    xaxis, yaxis = axis("training time (s)", rangemode="tozero"), axis("accuracy", ticksuffix=" %")
    return Plot(
        "accuracy-time",
        "Accuracy over training time",
        "How soon each device count gets there. " + _curves_caption(study, curves, over_time=True),
        "Accuracy in percent over training time in seconds. Last value: " + _last_values(study, curves),
        figure(_curves(study, curves, over_time=True), xaxis, yaxis, showlegend=True),
    )


def _last_values(study: Study, curves: list[list[_Point]]) -> str:
    said = [
        f"{formats.devices(row.devices)}: {curve[-1].mean:.4g}"
        for row, curve in zip(study.rows, curves, strict=True)
        if curve
    ]
    return "; ".join(said) + "."
