"""A communication benchmark as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from paceline.report import comm_bench
from paceline.report.comm_plots import LIMIT, comm_plots, dash, series
from paceline.report.comm_table import figure_columns
from paceline.report.figure import INK, series_color
from paceline.report.formats import inverse_rate_text, size_text, time_text
from paceline.report.templates import render
from paceline.spec.comm_timing import CommCase, CommTimings

_DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4"}
"""plotly's names for dashes as SVG writes them."""


def render_comm_page(timings: CommTimings) -> str:
    """The whole page."""
    rows = comm_bench.comm_rows(timings)
    sizes = comm_bench.sizes(timings)
    largest = comm_bench.at_size(timings, sizes[-1])
    cases = comm_bench.cases(timings)
    limit = [(LIMIT, INK, _DASHES["dash"])] if any(row.minimum_s is not None for row in rows) else []
    ranks = " | ".join(", ".join(map(str, node)) for node in timings.nodes)
    return render(
        "comm_page.html",
        timings=timings,
        words=comm_bench,
        sizes=sizes,
        rows=rows,
        best=comm_bench.fastest_exact(largest) or min(largest, key=lambda row: row.timing.median_s),
        quickest=min(comm_bench.at_size(timings, sizes[0]), key=lambda row: row.timing.median_s),
        cases=cases,
        series=series,
        by_size=_columns_by_size(timings),
        columns=[
            ("Algorithm", lambda row: str(row.case)),
            ("Size", lambda row: size_text(row.size_bytes)),
            *figure_columns(timings),
        ],
        # One legend for all plots.
        keys=[(str(case), series_color(series(case) - 1), _DASHES[dash(case)]) for case in cases] + limit,
        plots=comm_plots(timings),
        environment=[("ranks by node", ranks), *timings.environment.items()],
        has_wires=any(row.case.wire != "float32" for row in rows),
        has_link_bytes=any(row.timing.link_bytes is not None for row in rows),
    )


def _columns_by_size(timings: CommTimings) -> list[tuple[str, Callable[[CommCase], str]]]:
    """The median time at every size, the fastest one marked, and the fitted line."""
    known = comm_bench.times_s(timings)

    def at(size: int) -> Callable[[CommCase], str]:
        fastest_s = min(seconds for (_, other), seconds in known.items() if other == size)

        def cell(case: CommCase) -> str:
            seconds = known.get((case, size))
            text = time_text(seconds)
            return Markup('<span class="fastest">{}</span>').format(text) if seconds == fastest_s else text

        return cell

    return [
        ("Algorithm", str),
        *((size_text(size), at(size)) for size in comm_bench.sizes(timings)),
        ("alpha", lambda case: time_text(comm_bench.fit_of(timings, case).alpha_s)),
        ("1/beta", lambda case: inverse_rate_text(comm_bench.fit_of(timings, case).beta_s_per_byte)),
    ]
