"""Timed sums over all workers in; a table for the terminal, JSON and Markdown out.

Bandwidths are those of nccl-tests: algbw = bytes / time, and busbw = algbw * 2 (n - 1) / n for n workers, which for a
ring is what goes over each worker's link. Times are the medians over the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.formats import NOTHING, listing, percent
from paceline.spec.comm_timing import CommCase, CommFit, CommTiming, CommTimings

PAGE_FILE, MARKDOWN_FILE = "comm.html", "comm.md"

BASELINE = CommCase("all_reduce")
"""What others are compared with: the backend's own."""

_FULL_WIDTH = 96
_MOST_COLUMNS = 5
"""Sizes that fit beside the names into 100 columns of a terminal."""


@dataclass(frozen=True)
class CommRow:
    """One timing with what follows from it; None where it does not."""

    timing: CommTiming
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    minimum_s: float | None
    """See `minimum_s`."""
    over_baseline: float | None
    """Time over that of `all_reduce` at the same size."""

    @property
    def case(self) -> CommCase:
        return self.timing.case

    @property
    def size_bytes(self) -> int:
        return self.timing.size_bytes

    @property
    def link_share(self) -> float | None:
        """The part of the link's rate that is put to use: minimum over time."""
        return None if self.minimum_s is None else self.minimum_s / self.timing.median_s

    @property
    def over_minimum(self) -> float | None:
        return None if not self.minimum_s else self.timing.median_s / self.minimum_s


def comm_rows(timings: CommTimings) -> list[CommRow]:
    """A row for each timing, in their order."""
    n = timings.world_size
    baseline_s = {timing.size_bytes: timing.median_s for timing in timings.timings if timing.case == BASELINE}
    rows = []
    for timing in timings.timings:
        algbw = timing.size_bytes / timing.median_s
        base_s = baseline_s.get(timing.size_bytes)
        rows.append(
            CommRow(
                timing,
                algbw,
                algbw * 2 * (n - 1) / n,
                minimum_s(timings, timing.case, timing.size_bytes),
                None if base_s is None else timing.median_s / base_s,
            )
        )
    return rows


def minimum_s(timings: CommTimings, case: CommCase, size_bytes: int) -> float | None:
    """The least time that the links allow: 2 (m - 1) / m of the message over each, in each direction, at their rate.

    m is the number of nodes, or of workers on one node: no sum needs less (Patarasuk and Yuan 2009). None where the
    rate is not known, or nothing has to travel.
    """
    rate = timings.request.link_rate_bytes_per_s
    m = len(timings.nodes) if len(timings.nodes) > 1 else timings.world_size
    if rate is None or m < 2:
        return None
    itemsize = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[timings.request.dtype]
    # Values travel as the algorithm holds them, 16 bits widened to 32; int8 brings a scale of 4 bytes a 1,024 values.
    width = {"float32": max(4, itemsize), "bfloat16": 2, "float16": 2, "int8": 1 + 4 / 1024}[case.wire]
    return size_bytes / itemsize * width * 2 * (m - 1) / m / rate


def fastest_exact(rows: Sequence[CommRow]) -> CommRow | None:
    """The fastest of rows of one size whose values travel as they are."""
    return min((row for row in rows if row.case.wire == "float32"), key=lambda row: row.timing.median_s, default=None)


def comm_mapping(timings: CommTimings) -> dict[str, Any]:
    """The result of `paceline bench comm --json`: every figure with its unit in its name, null where there is none."""
    return {
        "world_size": timings.world_size,
        "num_nodes": len(timings.nodes),
        "device_kind": timings.device_kind,
        "dtype": timings.request.dtype,
        "link_rate_bytes_per_s": timings.request.link_rate_bytes_per_s,
        "rows": [
            {
                **_case_mapping(row.case),
                "size_bytes": row.size_bytes,
                "num_rounds": len(row.timing.times_s),
                "median_s": row.timing.median_s,
                "min_s": row.timing.min_s,
                "algbw_bytes_per_s": row.algbw_bytes_per_s,
                "busbw_bytes_per_s": row.busbw_bytes_per_s,
                "minimum_s": row.minimum_s,
                "link_share": row.link_share,
                "link_bytes": row.timing.link_bytes,
                "over_all_reduce": row.over_baseline,
            }
            for row in comm_rows(timings)
        ],
        "fits": [
            {**_case_mapping(fit.case), "alpha_s": fit.alpha_s, "beta_s_per_byte": fit.beta_s_per_byte}
            for fit in timings.fits
        ],
        "left_out": [
            {**_case_mapping(left.case), "sizes_bytes": list(left.sizes_bytes), "reason": left.reason}
            for left in timings.left_out
        ],
        "environment": dict(timings.environment),
    }


def _case_mapping(case: CommCase) -> dict[str, str]:
    return {"algorithm": case.algorithm, "wire": case.wire, "order": case.order}


# --- words ---


def place_text(timings: CommTimings) -> str:
    """ "4 workers on 2 nodes"."""
    n, nodes = timings.world_size, len(timings.nodes)
    return f"{n} worker{'s' * (n > 1)} on {nodes} node{'s' * (nodes > 1)}"


def size_text(num_bytes: int) -> str:
    """In the unit in which it is a round number: 4096 as "4 KiB", 100,000,000 as "100 MB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power} {unit}"
    return _scaled(num_bytes, ("B", "KB", "MB", "GB"))


def rate_text(bytes_per_s: float | None) -> str:
    """Three digits: "23.4 MB/s"."""
    return NOTHING if bytes_per_s is None else _scaled(bytes_per_s, ("B/s", "KB/s", "MB/s", "GB/s", "TB/s"))


def time_text(seconds: float | None) -> str:
    """Three digits: "476 µs", "7.31 ms", "4.18 s"."""
    if seconds is None:
        return NOTHING
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 0.9995 or scale == 1e6:
            return f"{_three(seconds * scale)} {unit}"
    raise AssertionError


def ratio_text(factor: float | None) -> str:
    return NOTHING if factor is None else f"{_three(factor)}x"


def megabytes_text(num_bytes: float | None) -> str:
    """Three digits, without the unit."""
    return NOTHING if num_bytes is None else _three(num_bytes / 1e6)


def inverse_rate_text(beta_s_per_byte: float) -> str:
    """1 / beta as a rate: what a long message approaches."""
    return rate_text(1 / beta_s_per_byte if beta_s_per_byte > 0 else None)


def rounds_text(rows: Sequence[CommRow]) -> str:
    """How many rounds the medians are of."""
    counts = sorted({len(row.timing.times_s) for row in rows})
    if counts == [1]:
        return "1 round"
    return f"{counts[0]} rounds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} rounds"


def left_out_sentences(timings: CommTimings) -> list[str]:
    """What was asked for and is missing, and why."""
    all_sizes = set(timings.request.sizes_bytes)
    groups: dict[tuple[str, str], list[str]] = {}
    for left in timings.left_out:
        where = "" if set(left.sizes_bytes) == all_sizes else f" at {size_text(min(left.sizes_bytes))}"
        where += " and more" if where and len(left.sizes_bytes) > 1 else ""
        groups.setdefault((where, left.reason), []).append(str(left.case))
    return [f"Left out: {listing(names)}{where}: {reason}." for (where, reason), names in groups.items()]


def verdict(timings: CommTimings) -> str:
    """Which exact sum is the fastest where messages are longest."""
    rows = at_size(timings, largest_size(timings))
    best = fastest_exact(rows)
    if best is None:
        return f"{place_text(timings)}: only rounded formats were timed."
    where = size_text(best.size_bytes)
    base = next((row for row in rows if row.case == BASELINE), None)
    if base is None or len(rows) == 1:
        return f"{best.case} sums {where} in {time_text(best.timing.median_s)}."
    if best is base:
        return f"At {where} the backend's own all_reduce is the fastest exact sum."
    return f"At {where} {best.case} is the fastest exact sum: {ratio_text(best.over_baseline)} the time of all_reduce."


def largest_size(timings: CommTimings) -> int:
    return max(timing.size_bytes for timing in timings.timings)


def at_size(timings: CommTimings, size_bytes: int) -> list[CommRow]:
    """The rows of one size."""
    return [row for row in comm_rows(timings) if row.size_bytes == size_bytes]


def cases(timings: CommTimings) -> list[CommCase]:
    """All that were timed."""
    return list(dict.fromkeys(timing.case for timing in timings.timings))


def sizes(timings: CommTimings) -> list[int]:
    return sorted({timing.size_bytes for timing in timings.timings})


def fit_of(timings: CommTimings, case: CommCase) -> CommFit:
    return next(fit for fit in timings.fits if fit.case == case)


def _scaled(number: float, units: Sequence[str]) -> str:
    power = min(max(0, int(math.log10(max(number, 1)) // 3)), len(units) - 1)
    scaled = number / 1000**power
    return f"{scaled:g} {units[power]}" if scaled == int(scaled) else f"{_three(scaled)} {units[power]}"


def _three(number: float) -> str:
    """Three significant digits, without an exponent."""
    if number <= 0:
        return "0"
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


# --- terminal ---


def comm_table(timings: CommTimings, width: int = _FULL_WIDTH) -> RenderableType:
    """Times by size, then all figures of the largest size, or in less than 96 columns the most important ones."""
    largest = largest_size(timings)
    rows = at_size(timings, largest)
    rate = timings.request.link_rate_bytes_per_s
    link = "" if rate is None else f", links of {rate_text(rate)}"
    shown = _shown_sizes(timings)
    more = "" if len(shown) == len(sizes(timings)) else f" All sizes are in {PAGE_FILE}."
    lines = [Text(sentence) for sentence in left_out_sentences(timings)]
    return Group(
        Text(f"{place_text(timings)} ({timings.device_kind}), {timings.request.dtype}{link}", style="bold"),
        Text(f"Median time, of {rounds_text(comm_rows(timings))}; every sum was checked.{more}"),
        _times_table(timings, shown),
        Text(
            f"\nAt {size_text(largest)}, over {rounds_text(rows)}; ratio: time over that of all_reduce; "
            "alpha and beta: over all sizes."
        ),
        _figures_table(timings, rows, is_wide=width >= _FULL_WIDTH),
        *lines,
        Text(f"\n{verdict(timings)}", style="bold"),
    )


def _shown_sizes(timings: CommTimings) -> list[int]:
    """As many as fit, the smallest and the largest among them."""
    found = sizes(timings)
    if len(found) <= _MOST_COLUMNS:
        return found
    last = len(found) - 1
    return [found[round(place * last / (_MOST_COLUMNS - 1))] for place in range(_MOST_COLUMNS)]


def _times_table(timings: CommTimings, shown: Sequence[int]) -> Table:
    table = _table("algorithm", *map(size_text, shown))
    times_s = {(row.case, row.size_bytes): row.timing.median_s for row in comm_rows(timings)}
    fastest = {size: min(s for (_, other), s in times_s.items() if other == size) for size in shown}
    for case in cases(timings):
        cells = []
        for size in shown:
            seconds = times_s.get((case, size))
            cells.append(Text(time_text(seconds), style="bold green" if seconds == fastest[size] else ""))
        table.add_row(str(case), *cells)
    return table


def _figures_table(timings: CommTimings, rows: Sequence[CommRow], *, is_wide: bool) -> Table:
    has_share = any(row.link_share is not None for row in rows)
    more = slice(None) if is_wide else slice(0)
    table = _table(
        *("algorithm", "median", *["min", "algbw"][more], "busbw"),
        *(["link"] if has_share else []),
        *("ratio", "alpha", "1/beta"),
    )
    for row in rows:
        fit = fit_of(timings, row.case)
        table.add_row(
            str(row.case),
            time_text(row.timing.median_s),
            *[time_text(row.timing.min_s), rate_text(row.algbw_bytes_per_s)][more],
            rate_text(row.busbw_bytes_per_s),
            *([percent(row.link_share, 0)] if has_share else []),
            ratio_text(row.over_baseline),
            time_text(fit.alpha_s),
            inverse_rate_text(fit.beta_s_per_byte),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold", no_wrap=place > 0)
    return table


# --- Markdown ---


def comm_markdown(timings: CommTimings) -> str:
    """Everything, as text that renders anywhere."""
    shown = sizes(timings)
    rows = comm_rows(timings)
    times_s = {(row.case, row.size_bytes): row.timing.median_s for row in rows}
    by_size = [
        [
            str(case),
            *(time_text(times_s.get((case, size))) for size in shown),
            time_text(fit_of(timings, case).alpha_s),
            inverse_rate_text(fit_of(timings, case).beta_s_per_byte),
        ]
        for case in cases(timings)
    ]
    facts = [f"- {key}: {value}" for key, value in timings.environment.items()]
    parts = [
        f"# Sums over {place_text(timings)} ({timings.device_kind}, {timings.request.dtype})",
        verdict(timings),
        f"Median times of {rounds_text(rows)}; every sum was checked.",
        markdown_table(["algorithm", *map(size_text, shown), "alpha", "1/beta"], by_size),
        *left_out_sentences(timings),
        f"## At {size_text(largest_size(timings))}",
        comm_markdown_at(timings, largest_size(timings)),
        "## Measured on",
        "\n".join(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comm_markdown_at(timings: CommTimings, size_bytes: int) -> str:
    """One table of all figures at one size."""
    rows = at_size(timings, size_bytes)
    has_link = any(row.timing.link_bytes is not None for row in rows)
    has_minimum = any(row.minimum_s is not None for row in rows)
    head = ["algorithm", "median", "min", "rounds", "algbw", "busbw"]
    head += ["MB a link"] if has_link else []
    head += ["of link", "time / minimum"] if has_minimum else []
    head.append("time / all_reduce")
    lines = []
    for row in rows:
        line = [
            *(str(row.case), time_text(row.timing.median_s), time_text(row.timing.min_s)),
            *(str(len(row.timing.times_s)), rate_text(row.algbw_bytes_per_s), rate_text(row.busbw_bytes_per_s)),
        ]
        line += [megabytes_text(row.timing.link_bytes)] if has_link else []
        line += [percent(row.link_share, 0), ratio_text(row.over_minimum)] if has_minimum else []
        lines.append([*line, ratio_text(row.over_baseline)])
    return markdown_table(head, lines)


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))
