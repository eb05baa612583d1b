"""Benchmarks of communication as they might have been measured, for tests of their report."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import (
    CommCase,
    CommFit,
    CommRequest,
    CommTiming,
    CommTimings,
    UntimedCases,
)

ALL_REDUCE, HIERARCHICAL = CommCase("all_reduce"), CommCase("hierarchical")
CASES = (
    *(CommCase(name) for name in algorithm_names()),
    CommCase("ring", order="alternating"),
    CommCase("hierarchical", "bfloat16"),
    CommCase("all_reduce", "float16"),
)
SIZES = (65_536, 1_048_576, 100_000_000)


def sample_timings(
    nodes: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)),
    cases: Sequence[CommCase] = CASES,
    link_rate_bytes_per_s: float | None = 25e6,
    link_bytes: bool = True,
) -> CommTimings:
    """The n-th case takes 1 ms plus 40 n ns a byte; hierarchical is the fastest, tree_exact was too slow at last."""
    order = sorted(cases, key=lambda case: case.algorithm != "hierarchical")
    slope = {case: 40e-9 * (1 + place / 4) for place, case in enumerate(order)}
    left_out = tuple(
        UntimedCases(case, SIZES[-1:], "about 90 s a call; the budget is 60 s for all")
        for case in cases
        if case.algorithm == "tree_exact"
    )
    timings = tuple(
        CommTiming(
            case,
            size,
            tuple(noise * (1e-3 + slope[case] * size) for noise in (1.0, 1.1, 1.3)),
            1.05 * size if link_bytes else None,
        )
        for size in SIZES
        for case in cases
        if case not in [left.case for left in left_out] or size != SIZES[-1]
    )
    request = CommRequest(
        cases=tuple(cases),
        sizes_bytes=SIZES,
        link_rate_bytes_per_s=link_rate_bytes_per_s,
        interface="eth0" if link_bytes else None,
    )
    fits = tuple(CommFit(case, 1.1e-3, 1.1 * slope[case]) for case in cases)
    environment = {"torch": "2.13.0", "processor": "a <processor> & more"}
    return CommTimings(request, nodes, "cpu", timings, fits, left_out, environment)
