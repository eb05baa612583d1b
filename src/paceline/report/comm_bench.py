"""What timed sums over all workers say: bandwidths, limits, comparisons, sentences and JSON.

Bandwidths are those of nccl-tests: algbw = bytes / time, and busbw = algbw * 2 (n - 1) / n for n workers, which for a
ring is what goes over each worker's link. Times are the medians over the rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.report.formats import size_text, time_text
from paceline.spec.comm_timing import CommCase, CommTiming, CommTimings
from paceline.spec.wire import WIRE_FACTS
from paceline.words import listing, number_of

PAGE_FILE = "comm.html"

BASELINE = CommCase("all_reduce")
"""The algorithm that others are compared with: the backend's own."""


@dataclass(frozen=True)
class CommRow:
    """One timing with what follows from it; None where it does not."""

    timing: CommTiming
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    minimum_s: float | None
    """See `minimum_s`."""
    speedup: float | None
    """The time of `all_reduce` at the same size over this one: 2 is twice as fast."""

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
                None if base_s is None else base_s / timing.median_s,
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
    # Exact values travel as the algorithm holds them, 16 bits widened to 32.
    width = max(4, itemsize) if case.wire == "float32" else WIRE_FACTS[case.wire].bytes_per_value
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
                **dataclasses.asdict(row.case),
                "size_bytes": row.size_bytes,
                "num_rounds": len(row.timing.times_s),
                "median_s": row.timing.median_s,
                "min_s": row.timing.min_s,
                "algbw_bytes_per_s": row.algbw_bytes_per_s,
                "busbw_bytes_per_s": row.busbw_bytes_per_s,
                "minimum_s": row.minimum_s,
                "link_share": row.link_share,
                "link_bytes": row.timing.link_bytes,
                "speedup_over_all_reduce": row.speedup,
            }
            for row in comm_rows(timings)
        ],
        "fits": [
            {**dataclasses.asdict(fit.case), "alpha_s": fit.alpha_s, "beta_s_per_byte": fit.beta_s_per_byte}
            for fit in timings.fits
        ],
        "left_out": [
            {**dataclasses.asdict(left.case), "sizes_bytes": list(left.sizes_bytes), "reason": left.reason}
            for left in timings.left_out
        ],
        "environment": dict(timings.environment),
    }


# --- words ---


def place_text(timings: CommTimings) -> str:
    """ "4 workers on 2 nodes"."""
    return f"{number_of(timings.world_size, 'worker')} on {number_of(len(timings.nodes), 'node')}"


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
    """Which exact sum is the fastest where messages are longest; and what disturbed the timings, if anything did."""
    load = timings.machine_load
    if load is not None and load.is_disturbing:
        return (
            f"These figures may be wrong: {load.sentence()}. Time again while the machine is idle. {_fastest(timings)}"
        )
    return _fastest(timings)


def _fastest(timings: CommTimings) -> str:
    rows = at_size(timings, sizes(timings)[-1])
    best = fastest_exact(rows)
    if best is None:
        return f"{place_text(timings)}: only rounded formats were timed."
    where = size_text(best.size_bytes)
    base = next((row for row in rows if row.case == BASELINE), None)
    if base is None or len(rows) == 1:
        return f"{best.case} sums {where} in {time_text(best.timing.median_s)}."
    if best is base:
        return f"At {where} the backend's own all_reduce is the fastest exact sum."
    speed = base.timing.median_s / best.timing.median_s
    return f"At {where} {best.case} is the fastest exact sum: {speed:.2g} times as fast as all_reduce."


def advice(timings: CommTimings) -> str:
    """Which exact sum to use for messages of which size, in a sentence; empty where there was no choice."""
    fastest = [(size, row.case) for size in sizes(timings) if (row := fastest_exact(at_size(timings, size)))]
    if len({row.case for row in comm_rows(timings) if row.case.wire == "float32"}) < 2 or not fastest:
        return ""
    ranges = [(case, [size for size, _ in held]) for case, held in groupby(fastest, key=lambda one: one[1])]
    if len(ranges) == 1:
        return f"Use {ranges[0][0]} for messages of every size measured."
    said = [
        f"{case} {'at' if held[0] == held[-1] else f'from {size_text(held[0])} to'} {size_text(held[-1])}"
        for case, held in ranges
    ]
    return f"Use {listing(said)}."


def at_size(timings: CommTimings, size_bytes: int) -> list[CommRow]:
    """The rows of one size."""
    return [row for row in comm_rows(timings) if row.size_bytes == size_bytes]


def cases(timings: CommTimings) -> list[CommCase]:
    """All that were timed."""
    return list(dict.fromkeys(timing.case for timing in timings.timings))


def sizes(timings: CommTimings) -> list[int]:
    """Ascending."""
    return sorted({timing.size_bytes for timing in timings.timings})
