"""A communication benchmark as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from paceline.report import comm_bench, formats
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
        meaning=_meaning(timings),
    )


def _meaning(timings: CommTimings) -> list[tuple[str, str]]:
    """(term, sentence): what the numbers of this page are, and what they cannot say."""
    n = timings.world_size
    terms = [
        (
            "Time",
            f"Of the slowest of the {n} workers, from when all were ready; the median of "
            f"{comm_bench.rounds_text(comm_bench.comm_rows(timings))}. In a round all algorithms take turns. Every "
            "sum was compared with what it should be.",
        ),
        (
            "algbw and busbw",
            "algbw is bytes over time. busbw is algbw times 2 (n - 1) / n for n workers: what goes over each worker's "
            "link in a ring, and comparable between numbers of workers. As in nccl-tests.",
        ),
        (
            "alpha and beta",
            "The line alpha + bytes x beta with the least relative error through the medians: alpha is the latency, "
            "1/beta the algbw that a long message approaches.",
        ),
    ]
    rate = timings.request.link_rate_bytes_per_s
    if rate is not None and n > 1:
        several = len(timings.nodes) > 1
        who, m = ("node", len(timings.nodes)) if several else ("worker", n)
        terms.append(
            (
                "Limit and share of the link",
                f"Each of the {m} {who}s has to send and receive 2 ({m} - 1) / {m} of the message at least, at "
                f"{formats.rate_text(rate)}; a rounded format has less to send and a lower limit of its own. The "
                "share is that limit over the time.",
            )
        )
    if any(case.wire != "float32" for case in comm_bench.cases(timings)):
        terms.append(
            (
                "Formats",
                "bfloat16, float16 and int8 are how values travel. They are added in float32, and rounded on the way; "
                "without a format, values travel as they are.",
            )
        )
    if any(timing.link_bytes is not None for timing in timings.timings):
        terms.append(
            (
                "MB a link",
                f"What the network interface {timings.request.interface} of the busiest node sent or received in one "
                "call, headers included; the larger of both, and the median over the rounds.",
            )
        )
    return terms
