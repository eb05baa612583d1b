"""Forecasts of published scaling tables from their first rows, beside simpler laws.

    python -m benchmarks.forecast_tables --data DIR [--by-family]

DIR holds one CSV a table, as `paceline plan` reads it, and index.json with the family of each table. A table is
forecast from its first two rows, from its first three, and from its first and last row ("span"). `--by-family` shows
the families one by one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from paceline.measure.rows import read_rows
from paceline.plan.step_model import fit, predict, seconds_of
from paceline.spec import StepRow

SUBSETS = {"two": (0, 1), "three": (0, 1, 2), "span": (0, -1)}
PLANNER = "planner"
Law = Callable[[Sequence[StepRow], StepRow], float]


@dataclass(frozen=True)
class Case:
    """One row of a table, forecast by one method from others."""

    family: str
    method: str
    subset: str
    is_strong: bool
    num_nodes: int
    error: float
    low: float
    high: float
    """Ends of the 90 % interval, over the measured time."""


def last_step(known: Sequence[StepRow], wanted: StepRow) -> float:
    """The time for a sample of the largest measured row that is smaller, whatever more devices cost."""
    smaller = [row for row in known if row.num_workers <= wanted.num_workers] or list(known[:1])
    last = max(smaller, key=lambda row: row.num_workers)
    return seconds_of(last) * wanted.micro_batch_size / last.micro_batch_size


def _linear(num_terms: int) -> Law:
    """Gunther's universal scalability law, throughput n / (1 + s (n - 1) + k n (n - 1)), with constants of at least
    zero fitted to relative errors; two terms are Amdahl's law, k = 0. As many terms as rows at most."""

    def terms(row: StepRow, count: int) -> list[float]:
        samples, n = float(row.micro_batch_size), row.num_workers
        return [samples, samples * (n - 1), samples * n * (n - 1)][:count]

    def law(known: Sequence[StepRow], wanted: StepRow) -> float:
        count = min(num_terms, len(known))
        design = np.array([[term / seconds_of(row) for term in terms(row, count)] for row in known])
        return float(np.array(terms(wanted, count)) @ nnls(design, np.ones(len(known)))[0])

    return law


LAWS: dict[str, Law] = {"last step": last_step, "Amdahl": _linear(2), "USL": _linear(3)}


def cases_of(family: str, rows: Sequence[StepRow]) -> list[Case]:
    """Every way to forecast a table that leaves rows to forecast."""
    is_strong = len({row.micro_batch_size for row in rows}) > 1
    found = []
    for subset, places in SUBSETS.items():
        if len(rows) <= len(places):
            continue
        known = [rows[place] for place in places]
        wanted = [row for place, row in enumerate(rows) if not {place, place - len(rows)} & set(places)]
        for row, forecast in zip(wanted, predict(fit(known), wanted), strict=True):
            of_methods = {PLANNER: (forecast.step_s, forecast.low_s, forecast.high_s)}
            of_methods |= {name: (law(known, row), 0.0, math.inf) for name, law in LAWS.items()}
            for method, times_s in of_methods.items():
                middle, low, high = (time_s / seconds_of(row) for time_s in times_s)
                found.append(Case(family, method, subset, is_strong, row.num_nodes, middle - 1, low, high))
    return found


def cells(cases: Sequence[Case]) -> list[str]:
    """Errors of many cases in per cent; of the planner also how often the interval holds, and how wide it is."""
    errors = np.array([case.error for case in cases])
    found = [str(len(cases)), *(f"{100 * np.quantile(np.abs(errors), share):.1f}" for share in (0.5, 0.9))]
    found.append(f"{100 * float(np.median(errors)):+.1f}")
    if cases[0].method != PLANNER:
        return [*found, "", ""]
    width = math.exp(float(np.mean([math.log(case.high / case.low) for case in cases])))
    return [*found, f"{100 * float(np.mean([case.low <= 1 <= case.high for case in cases])):.0f}", f"{width:.2f}"]


SPLITS: dict[str, Callable[[Case], bool]] = {
    "weak": lambda case: not case.is_strong,
    "weak, inside a node": lambda case: not case.is_strong and case.num_nodes == 1,
    "weak, across nodes": lambda case: not case.is_strong and case.num_nodes > 1,
    "strong": lambda case: case.is_strong,
}


def lines_of(cases: Sequence[Case], by_family: bool) -> Iterator[list[str]]:
    splits = dict(SPLITS)
    if by_family:
        for family in dict.fromkeys(case.family for case in cases):
            splits[family] = lambda case, family=family: case.family == family  # type: ignore[misc]
    for split, is_in in splits.items():
        for subset in SUBSETS:
            for method in (PLANNER, *LAWS):
                found = [case for case in cases if (case.subset, case.method) == (subset, method) and is_in(case)]
                if found:
                    yield [split, subset, method, *cells(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--by-family", action="store_true", help="also each family by itself")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    index = json.loads((given.data / "index.json").read_text(encoding="utf-8"))
    tables = [(entry["family"], read_rows(given.data / f"{name}.csv")) for name, entry in index.items()]
    with Pool(given.processes) as pool:
        cases = [case for of_table in pool.starmap(cases_of, tables, chunksize=4) for case in of_table]
    headings = ["rows of", "from", "method", "rows", "median, %", "90th percentile, %", "bias, %", "held, %", "width"]
    for line in [headings, ["---"] * len(headings), *lines_of(cases, given.by_family)]:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
