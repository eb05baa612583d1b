"""A communication benchmark as one HTML page that needs nothing but a browser, and its files."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from paceline.errors import JobError, PacelineError
from paceline.regular_files import read_json
from paceline.report import comm_bench
from paceline.report.comm_plots import LIMIT, comm_plots, dash, series
from paceline.report.comm_table import FITTED, comm_markdown, figure_columns, fit_texts, size_columns
from paceline.report.figure import INK, series_color
from paceline.report.files import write_files
from paceline.report.formats import size_text
from paceline.report.templates import render
from paceline.spec.comm_timing import TIMINGS_FILE, CommTimings

_DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4"}
"""plotly's names for dashes as SVG writes them."""


def render_comm_page(timings: CommTimings) -> str:
    """The whole page."""
    rows = comm_bench.comm_rows(timings)
    sizes = comm_bench.sizes(timings)
    largest = comm_bench.at_size(timings, sizes[-1])
    cases, fits = comm_bench.cases(timings), fit_texts(timings)
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
        color=lambda case: series_color(series(case)),
        by_size=[
            ("Algorithm", str),
            *size_columns(timings, sizes, Markup('<span class="fastest">{}</span>').format),
            *((heading, lambda case, place=place: fits[case][place]) for place, heading in enumerate(FITTED)),
        ],
        columns=[
            ("Algorithm", lambda row: str(row.case)),
            ("Size", lambda row: size_text(row.size_bytes)),
            *figure_columns(timings),
        ],
        # One legend for all plots.
        keys=[(str(case), series_color(series(case)), _DASHES[dash(case)]) for case in cases] + limit,
        plots=comm_plots(timings),
        environment=[("ranks by node", ranks), *timings.environment.items()],
        has_wires=any(row.case.wire != "float32" for row in rows),
        has_link_bytes=any(row.timing.link_bytes is not None for row in rows),
    )


def load_timings(path: Path) -> CommTimings:
    """The timings of a file, or of a folder that holds one.

    Raises:
        PacelineError: there is none, or it is damaged; the message names the file.
    """
    path = path / TIMINGS_FILE if path.is_dir() else path
    try:
        return CommTimings.from_mapping(read_json(path))
    except OSError as problem:
        raise PacelineError(f"The timings '{path}' cannot be read: {problem.strerror}.") from None
    except (ValueError, JobError) as problem:
        raise PacelineError(f"The timings '{path}' are damaged or of another version: {problem}") from None


def write_comm_bench(timings: CommTimings, out: Path) -> None:
    """Write comm.html and comm.md into the folder `out`.

    Raises:
        PacelineError: the folder cannot be made or written to.
    """
    write_files({comm_bench.PAGE_FILE: render_comm_page(timings), "comm.md": comm_markdown(timings)}, out)
