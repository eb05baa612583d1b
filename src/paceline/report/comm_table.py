"""A communication benchmark as tables for the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.comm_bench import (
    PAGE_FILE,
    CommRow,
    at_size,
    cases,
    comm_rows,
    left_out_sentences,
    place_text,
    rounds_text,
    sizes,
    verdict,
)
from paceline.report.formats import (
    megabytes_text,
    percent,
    rate_text,
    ratio_text,
    size_text,
    time_text,
)
from paceline.report.tables import markdown_table, table
from paceline.spec.comm_timing import CommCase, CommTimings

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


def size_columns(
    timings: CommTimings, shown: Sequence[int], mark: Callable[[str], Any]
) -> list[tuple[str, Callable[[CommCase], Any]]]:
    """Heading and cell of the median time at each of these sizes; `mark` makes the cell of the fastest one."""
    known = {(timing.case, timing.size_bytes): timing.median_s for timing in timings.timings}

    def at(size: int) -> Callable[[CommCase], Any]:
        fastest_s = min(seconds for (_, other), seconds in known.items() if other == size)

        def cell(case: CommCase) -> Any:
            seconds = known.get((case, size))
            return mark(time_text(seconds)) if seconds == fastest_s else time_text(seconds)

        return cell

    return [(size_text(size), at(size)) for size in shown]


FITTED = ("alpha", "1/beta")
"""Headings of `fit_texts`."""


def fit_texts(timings: CommTimings) -> dict[CommCase, tuple[str, str]]:
    """The fitted line of each case: its latency, and the rate that a long message approaches."""
    return {
        fit.case: (time_text(fit.alpha_s), rate_text(1 / fit.beta_s_per_byte if fit.beta_s_per_byte > 0 else None))
        for fit in timings.fits
    }


def comm_table(timings: CommTimings, width: int = _FULL_WIDTH) -> RenderableType:
    """Times by size, then all figures of the largest size, or in less than 96 columns the most important ones."""
    largest = sizes(timings)[-1]
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
    columns = size_columns(timings, shown, lambda text: Text(text, style="bold green"))
    found = table("algorithm", *(heading for heading, _ in columns), left=("algorithm",))
    for case in cases(timings):
        found.add_row(str(case), *(cell(case) for _, cell in columns))
    return found


def _figures_table(timings: CommTimings, rows: Sequence[CommRow], *, is_wide: bool) -> Table:
    cells, fits = dict(figure_columns(timings)), fit_texts(timings)
    shown = {"median": "median", "min": "min", "algbw": "algbw", "busbw": "busbw", "link": "of link"}
    shown["ratio"] = "x all_reduce"
    left_out = () if is_wide else ("min", "algbw")
    columns = {heading: cells[name] for heading, name in shown.items() if name in cells and name not in left_out}
    found = table("algorithm", *columns, *FITTED, left=("algorithm",))
    for row in rows:
        found.add_row(str(row.case), *(cell(row) for cell in columns.values()), *fits[row.case])
    return found


def comm_markdown(timings: CommTimings) -> str:
    """Everything, as text that renders anywhere."""
    shown, fits = size_columns(timings, sizes(timings), str), fit_texts(timings)
    by_size = [[str(case), *(cell(case) for _, cell in shown), *fits[case]] for case in cases(timings)]
    largest = sizes(timings)[-1]
    parts = [
        f"# Sums over {place_text(timings)} ({timings.device_kind}, {timings.request.dtype})",
        verdict(timings),
        f"Median times of {rounds_text(comm_rows(timings))}; every sum was checked.",
        markdown_table(["algorithm", *(heading for heading, _ in shown), *FITTED], by_size),
        *left_out_sentences(timings),
        f"## At {size_text(largest)}",
        comm_markdown_at(timings, largest),
        "## Measured on",
        "\n".join(f"- {key}: {value}" for key, value in timings.environment.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comm_markdown_at(timings: CommTimings, size_bytes: int) -> str:
    """One table of all figures at one size."""
    columns = figure_columns(timings)
    lines = [[str(row.case), *(cell(row) for _, cell in columns)] for row in at_size(timings, size_bytes)]
    return markdown_table(["algorithm", *(heading for heading, _ in columns)], lines)
