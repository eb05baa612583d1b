"""A communication benchmark as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from paceline.report import comm_bench
from paceline.report.comm_plots import comm_plots, dash, series
from paceline.report.comm_table import figure_columns
from paceline.report.templates import render
from paceline.spec.comm_timing import CommTimings

_DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4"}
"""plotly's names for dashes as SVG writes them."""


def render_comm_page(timings: CommTimings) -> str:
    """The whole page."""
    rows = comm_bench.comm_rows(timings)
    sizes = comm_bench.sizes(timings)
    largest = comm_bench.at_size(timings, sizes[-1])
    return render(
        "comm_page.html",
        timings=timings,
        words=comm_bench,
        sizes=sizes,
        rows=rows,
        best=comm_bench.fastest_exact(largest) or min(largest, key=lambda row: row.timing.median_s),
        quickest=min(comm_bench.at_size(timings, sizes[0]), key=lambda row: row.timing.median_s),
        fastest_s={size: min(row.timing.median_s for row in rows if row.size_bytes == size) for size in sizes},
        times_s=comm_bench.times_s(timings),
        columns=figure_columns(timings),
        has_limit=any(row.minimum_s is not None for row in rows),
        keys=[(str(case), series(case), _DASHES[dash(case)]) for case in comm_bench.cases(timings)],
        plots=comm_plots(timings),
        has_wires=any(row.case.wire != "float32" for row in rows),
        has_link_bytes=any(row.timing.link_bytes is not None for row in rows),
    )
