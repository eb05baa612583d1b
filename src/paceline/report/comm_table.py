"""A communication benchmark as tables for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.comm_bench import (
    PAGE_FILE,
    CommRow,
    at_size,
    cases,
    comm_rows,
    fit_of,
    largest_size,
    left_out_sentences,
    place_text,
    rounds_text,
    sizes,
    times_s,
    verdict,
)
from paceline.report.formats import (
    inverse_rate_text,
    megabytes_text,
    percent,
    rate_text,
    ratio_text,
    size_text,
    time_text,
)
from paceline.report.tables import markdown_table, table
from paceline.spec.comm_timing import CommTimings

_FULL_WIDTH = 96
"""Columns of a terminal in which every figure has room."""
_MOST_SIZES = 5
"""Sizes that fit beside the names into 100 columns of a terminal."""

Column = tuple[str, Callable[[CommRow], str]]


def figure_columns(timings: CommTimings) -> list[Column]:
    """Heading and cell of every figure that this benchmark has."""
    rows = comm_rows(timings)
    found: list[Column] = [
        ("median", lambda row: time_text(row.timing.median_s)),
        ("min", lambda row: time_text(row.timing.min_s)),
        ("rounds", lambda row: str(len(row.timing.times_s))),
        ("algbw", lambda row: rate_text(row.algbw_bytes_per_s)),
        ("busbw", lambda row: rate_text(row.busbw_bytes_per_s)),
    ]
    if any(row.timing.link_bytes is not None for row in rows):
        found.append(("MB a link", lambda row: megabytes_text(row.timing.link_bytes)))
    if any(row.minimum_s is not None for row in rows):
        found.append(("of link", lambda row: percent(row.link_share, 0)))
        found.append(("time / minimum", lambda row: ratio_text(row.over_minimum)))
    return [*found, ("x all_reduce", lambda row: ratio_text(row.speedup))]


def comm_table(timings: CommTimings, width: int = _FULL_WIDTH) -> RenderableType:
    """Times by size, then all figures of the largest size, or in less than 96 columns the most important ones."""
    largest = largest_size(timings)
    rows = at_size(timings, largest)
    rate = timings.request.link_rate_bytes_per_s
    link = "" if rate is None else f", links of {rate_text(rate)}"
    shown = _shown_sizes(timings)
    more = "" if len(shown) == len(sizes(timings)) else f" All sizes are in {PAGE_FILE}."
    return Group(
        Text(f"{place_text(timings)} ({timings.device_kind}), {timings.request.dtype}{link}", style="bold"),
        Text(f"Median time, of {rounds_text(comm_rows(timings))}; every sum was checked.{more}"),
        _times_table(timings, shown),
        Text(
            f"\nAt {size_text(largest)}, over {rounds_text(rows)}; ratio: how many times as fast as all_reduce; "
            "alpha and beta: over all sizes."
        ),
        _figures_table(timings, rows, is_wide=width >= _FULL_WIDTH),
        *map(Text, left_out_sentences(timings)),
        Text(f"\n{verdict(timings)}", style="bold"),
    )


def _shown_sizes(timings: CommTimings) -> list[int]:
    """As many sizes as fit into the table, the smallest and the largest among them."""
    found = sizes(timings)
    if len(found) <= _MOST_SIZES:
        return found
    last = len(found) - 1
    return [found[round(place * last / (_MOST_SIZES - 1))] for place in range(_MOST_SIZES)]


def _times_table(timings: CommTimings, shown: Sequence[int]) -> Table:
    found = table("algorithm", *map(size_text, shown), left=("algorithm",))
    known = times_s(timings)
    fastest = {size: min(seconds for (_, other), seconds in known.items() if other == size) for size in shown}
    for case in cases(timings):
        times = [(known.get((case, size)), fastest[size]) for size in shown]
        found.add_row(
            str(case), *(Text(time_text(s), style="bold green" if s == fastest_s else "") for s, fastest_s in times)
        )
    return found


def _figures_table(timings: CommTimings, rows: Sequence[CommRow], *, is_wide: bool) -> Table:
    cells = dict(figure_columns(timings))
    shown = {"median": "median", "min": "min", "algbw": "algbw", "busbw": "busbw", "link": "of link"}
    shown["ratio"] = "x all_reduce"
    left_out = () if is_wide else ("min", "algbw")
    columns = {heading: cells[name] for heading, name in shown.items() if name in cells and name not in left_out}
    found = table("algorithm", *columns, "alpha", "1/beta", left=("algorithm",))
    for row in rows:
        fit = fit_of(timings, row.case)
        figures = [cell(row) for cell in columns.values()]
        found.add_row(str(row.case), *figures, time_text(fit.alpha_s), inverse_rate_text(fit.beta_s_per_byte))
    return found


def comm_markdown(timings: CommTimings) -> str:
    """Everything, as text that renders anywhere."""
    shown, known = sizes(timings), times_s(timings)
    by_size = [
        [
            str(case),
            *(time_text(known.get((case, size))) for size in shown),
            time_text(fit_of(timings, case).alpha_s),
            inverse_rate_text(fit_of(timings, case).beta_s_per_byte),
        ]
        for case in cases(timings)
    ]
    parts = [
        f"# Sums over {place_text(timings)} ({timings.device_kind}, {timings.request.dtype})",
        verdict(timings),
        f"Median times of {rounds_text(comm_rows(timings))}; every sum was checked.",
        markdown_table(["algorithm", *map(size_text, shown), "alpha", "1/beta"], by_size),
        *left_out_sentences(timings),
        f"## At {size_text(largest_size(timings))}",
        comm_markdown_at(timings, largest_size(timings)),
        "## Measured on",
        "\n".join(f"- {key}: {value}" for key, value in timings.environment.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comm_markdown_at(timings: CommTimings, size_bytes: int) -> str:
    """One table of all figures at one size."""
    columns = figure_columns(timings)
    lines = [[str(row.case), *(cell(row) for _, cell in columns)] for row in at_size(timings, size_bytes)]
    return markdown_table(["algorithm", *(heading for heading, _ in columns)], lines)
