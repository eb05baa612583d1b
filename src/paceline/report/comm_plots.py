"""The plots of a communication benchmark; see `plots` for how colours are written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.report.comm_bench import (
    BASELINE,
    CommRow,
    cases,
    comm_rows,
    largest_size,
    minimum_s,
    rate_text,
    ratio_text,
    size_text,
    sizes,
    time_text,
)
from paceline.report.plots import INK, NUM_SERIES, SYMBOLS, Figure, Plot, axis_style, base_layout, series_color
from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import CommCase, CommTimings

_DASH_OF_WIRE = {"float32": "solid", "bfloat16": "dash", "float16": "dashdot", "int8": "dot"}


def series(case: CommCase) -> int:
    """The number of a case's colour: one an algorithm."""
    return algorithm_names().index(case.algorithm) % NUM_SERIES + 1


def dash(case: CommCase) -> str:
    """The dashes of a case's line: one kind a wire format."""
    return "longdash" if case.order == "alternating" else _DASH_OF_WIRE[case.wire]


def comm_plots(timings: CommTimings) -> list[Plot]:
    """All plots that have data, in the order of the page."""
    found = [_times(timings)]
    if timings.world_size > 1:
        found.append(_busbw(timings))
    if len(cases(timings)) > 1 and BASELINE in cases(timings):
        found.append(_over_baseline(timings))
    return found


def _times(timings: CommTimings) -> Plot:
    figure = _lines(timings, "time", lambda row: row.timing.median_s, time_text)
    limit = [minimum_s(timings, BASELINE, size) for size in sizes(timings)]
    figure["data"] += _limit_line(timings, limit, time_text)
    caption = (
        "Both axes are logarithmic. Flat is all latency; ten times the time for ten times the bytes is all bandwidth."
    )
    return Plot(
        "comm-time",
        "Time by message size",
        caption + _limit_caption(timings),
        "Median time against message size. " + _said(timings, lambda row: time_text(row.timing.median_s)),
        figure,
        wide=True,
    )


def _busbw(timings: CommTimings) -> Plot:
    figure = _lines(timings, "busbw", lambda row: row.busbw_bytes_per_s, rate_text)
    n = timings.world_size
    limit = []
    for size in sizes(timings):
        least_s = minimum_s(timings, BASELINE, size)
        limit.append(None if least_s is None else size / least_s * 2 * (n - 1) / n)
    figure["data"] += _limit_line(timings, limit, rate_text)
    return Plot(
        "comm-busbw",
        "Bus bandwidth by message size",
        "Bytes over time, times 2 (n - 1) / n for n workers, as in nccl-tests." + _limit_caption(timings),
        "Bus bandwidth against message size. " + _said(timings, lambda row: rate_text(row.busbw_bytes_per_s)),
        figure,
    )


def _over_baseline(timings: CommTimings) -> Plot:
    figure = _lines(timings, "time over that of all_reduce", lambda row: row.over_baseline, ratio_text)
    return Plot(
        "comm-relative",
        "Against all_reduce",
        "Time over that of the backend's own all_reduce at the same size: below 1 is faster.",
        "Time over that of all_reduce. " + _said(timings, lambda row: ratio_text(row.over_baseline)),
        figure,
    )


def _lines(
    timings: CommTimings, title: str, value: Callable[[CommRow], float | None], say: Callable[[float | None], str]
) -> Figure:
    """One line a case on two logarithmic axes."""
    rows = comm_rows(timings)
    data: list[dict[str, Any]] = []
    values = [found for found in map(value, rows) if found is not None]
    for case in cases(timings):
        mine = [row for row in rows if row.case == case]
        number = series(case) - 1
        symbol = SYMBOLS[number % len(SYMBOLS)] + ("-open" if case.order == "alternating" else "")
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": str(case),
                "x": [row.size_bytes for row in mine],
                "y": [value(row) for row in mine],
                "text": [f"{case}<br>{size_text(row.size_bytes)}: {say(value(row))}" for row in mine],
                "hovertemplate": "%{text}<extra></extra>",
                "line": {"color": series_color(number), "width": 2, "dash": dash(case)},
                "marker": {"size": 7, "color": series_color(number), "symbol": symbol},
            }
        )
    shown = sizes(timings)
    xaxis = axis_style("message size", type="log", tickvals=shown, ticktext=[size_text(size) for size in shown])
    ticks = _ticks(min(values), max(values))
    yaxis = axis_style(title, type="log", tickvals=ticks, ticktext=[_round(say(tick)) for tick in ticks])
    return {"data": data, "layout": base_layout(xaxis, yaxis, hovermode="closest")}


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the values, and steps between them where they lie close together."""
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if top - bottom > 4 else (1, 2, 5)
    return [step * 10.0**power for power in range(bottom, top + 1) for step in steps]


def _round(number: str) -> str:
    """Without the zeros behind a decimal point: "10.0 ms" as "10 ms"."""
    return re.sub(r"\.?0+(?=[ x])", "", number) if "." in number else number


def _limit_line(
    timings: CommTimings, values: Sequence[float | None], say: Callable[[float | None], str]
) -> list[dict[str, Any]]:
    if any(value is None for value in values):
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "physical limit",
            "x": sizes(timings),
            "y": list(values),
            "text": [
                f"physical limit<br>{size_text(size)}: {say(value)}"
                for size, value in zip(sizes(timings), values, strict=True)
            ],
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"color": INK, "width": 1.5, "dash": "dash"},
        }
    ]


def _limit_caption(timings: CommTimings) -> str:
    rate = timings.request.link_rate_bytes_per_s
    if minimum_s(timings, BASELINE, 1) is None:
        return ""
    return f" The dashed line without markers is what links of {rate_text(rate)} allow for values sent as they are."


def _said(timings: CommTimings, say: Callable[[CommRow], str]) -> str:
    largest = largest_size(timings)
    told = [f"{row.case}: {say(row)}" for row in comm_rows(timings) if row.size_bytes == largest]
    return f"At {size_text(largest)}: {'; '.join(told)}."
