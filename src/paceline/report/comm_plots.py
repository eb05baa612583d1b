"""The plots of a communication benchmark."""

from __future__ import annotations

import re
from collections.abc import Callable

from paceline.report.comm_bench import (
    BASELINE,
    CommRow,
    at_size,
    cases,
    comm_rows,
    fastest_exact,
    minimum_s,
    sizes,
)
from paceline.report.figure import (
    SYMBOLS,
    Plot,
    Trace,
    dashed,
    figure,
    line,
    log_axis,
    log_ticks,
    series_color,
)
from paceline.report.formats import rate_text, ratio_text, size_text, time_text
from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import CommCase, CommTimings
from paceline.spec.wire import WIRE_FACTS

Value = Callable[[CommRow], float | None]
Say = Callable[[float | None], str]

_DASHES = ("solid", "dash", "dashdot", "dot")


def series(case: CommCase) -> int:
    """The number of a case's colour, from 0: one an algorithm."""
    return algorithm_names().index(case.algorithm)


def dash(case: CommCase) -> str:
    """The dashes of a case's line: one kind a wire format."""
    return "longdash" if case.order == "alternating" else _DASHES[tuple(WIRE_FACTS).index(case.wire) % len(_DASHES)]


LIMIT = "physical limit"
"""The name of its line."""


def comm_plots(timings: CommTimings) -> list[Plot]:
    """All plots that have data, in the order of the page."""
    n, shown = timings.world_size, sizes(timings)
    limits_s = [minimum_s(timings, BASELINE, size) for size in shown]
    known = [limit_s for limit_s in limits_s if limit_s is not None]
    limit_caption = ""
    if known:
        rate = rate_text(timings.request.link_rate_bytes_per_s)
        limit_caption = f" The dashed line without markers is what links of {rate} allow for values sent as they are."
    found = [
        _plot(
            timings,
            ("comm-time", "Time by message size", "Median time against message size.", "time"),
            "Both axes are logarithmic. Where a line is flat, latency limits; where it takes ten times as long for "
            "ten times the bytes, bandwidth does." + limit_caption,
            lambda row: row.timing.median_s,
            time_text,
            known,
        )
    ]
    if n > 1:
        found.append(
            _plot(
                timings,
                ("comm-busbw", "Bus bandwidth by message size", "Bus bandwidth against message size.", "busbw"),
                "Bytes over time, times 2 (n - 1) / n for n workers, as in nccl-tests." + limit_caption,
                lambda row: row.busbw_bytes_per_s,
                rate_text,
                [size / limit_s * 2 * (n - 1) / n for size, limit_s in zip(shown, known, strict=False)],
            )
        )
    if len(cases(timings)) > 1 and BASELINE in cases(timings):
        found.append(
            _plot(
                timings,
                (
                    "comm-relative",
                    "Against all_reduce",
                    "How many times as fast as all_reduce.",
                    "speed over that of all_reduce",
                ),
                "Times as fast as the backend's own all_reduce at the same size: above 1 is faster.",
                lambda row: row.speedup,
                ratio_text,
                [],
            )
        )
    return found


def _plot(
    timings: CommTimings, names: tuple[str, str, str, str], caption: str, value: Value, say: Say, limit: list[float]
) -> Plot:
    """One line a case on two logarithmic axes, and the physical limit where it is known.

    Args:
        names: key, title, label and what the vertical axis shows.
        limit: at every size; empty: not known.
    """
    key, title, label, quantity = names
    rows, shown = comm_rows(timings), sizes(timings)
    values = [found for found in map(value, rows) if found is not None]
    ticks = log_ticks(min(values), max(values), most_decades=4)
    largest = shown[-1]
    best = fastest_exact(at_size(timings, largest))
    strong = {BASELINE} if best is None else {BASELINE, best.case}
    data = [
        _line(case, [row for row in rows if row.case == case], value, say, is_faint=case not in strong)
        for case in cases(timings)
    ]
    if limit:
        hover = [f"physical limit<br>{size_text(s)}: {say(least)}" for s, least in zip(shown, limit, strict=True)]
        data.append(dashed(shown, limit, LIMIT, hover=hover))
    told = [f"{row.case}: {say(value(row))}" for row in rows if row.size_bytes == largest]
    return Plot(
        key,
        title,
        caption,
        f"{label} At {size_text(largest)}: {'; '.join(told)}.",
        figure(
            data,
            log_axis("message size", shown, [size_text(size) for size in shown]),
            log_axis(quantity, ticks, [_without_zeros(say(tick)) for tick in ticks]),
        ),
        wide=key == "comm-time",
    )


def _line(case: CommCase, rows: list[CommRow], value: Value, say: Say, *, is_faint: bool) -> Trace:
    """The line of a case; faint where it is neither the fastest exact sum nor the backend's own."""
    number = series(case)
    symbol = SYMBOLS[number % len(SYMBOLS)] + ("-open" if case.order == "alternating" else "")
    return line(
        [row.size_bytes for row in rows],
        [value(row) for row in rows],
        series_color(number),
        name=str(case),
        dash=dash(case),
        width=1.5 if is_faint else 3,
        opacity=0.4 if is_faint else 1,
        marker={"size": 7, "symbol": symbol},
        hover=[f"{case}<br>{size_text(row.size_bytes)}: {say(value(row))}" for row in rows],
    )


def _without_zeros(number: str) -> str:
    """Without the zeros behind a decimal point: "10.0 ms" as "10 ms"."""
    return re.sub(r"\.?0+(?=[ x])", "", number) if "." in number else number
