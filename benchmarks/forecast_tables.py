"""Forecasts of published scaling tables from their first rows, beside simpler laws.

    python -m benchmarks.forecast_tables --data DIR [--by-family] [--rows] [--only FAMILY]

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

from paceline.plan.fit import fit, predict
from paceline.plan.step_model import seconds_of
from paceline.spec import StepRow
from paceline.workflows.step_rows import read_rows

SUBSETS = ("two", "three", "span")
PLANNER = "planner"
GROWTH = 1.3
"""A step that takes this many times as long as the last measured one, for the same samples, is hard to foresee."""


@dataclass(frozen=True)
class Table:
    name: str
    family: str
    rows: tuple[StepRow, ...]

    @property
    def is_strong(self) -> bool:
        return len({row.micro_batch_size for row in self.rows}) > 1


@dataclass(frozen=True)
class Case:
    """One row of a table, forecast by one method from others."""

    table: str
    family: str
    method: str
    subset: str
    is_strong: bool
    num_nodes: int
    num_devices: int
    is_new_network: bool
    """No measured row has several nodes, and this one has."""
    growth: float
    """How many times as long as ideal scaling from the last measured row makes it."""
    measured_s: float
    forecast_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        return self.forecast_s / self.measured_s - 1

    @property
    def is_held(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


def tables_of(folder: Path) -> list[Table]:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    return [Table(name, entry["family"], tuple(read_rows(folder / f"{name}.csv"))) for name, entry in index.items()]


def samples(row: StepRow) -> float:
    return float(row.micro_batch_size)


def devices(row: StepRow) -> int:
    return row.num_workers


Law = Callable[[Sequence[StepRow], StepRow], float]


def ideal(known: Sequence[StepRow], wanted: StepRow) -> float:
    first = known[0]
    return seconds_of(first) * samples(wanted) / samples(first)


def last_step(known: Sequence[StepRow], wanted: StepRow) -> float:
    """The time for a sample of the largest measured row that is smaller, whatever more devices cost."""
    smaller = [row for row in known if devices(row) <= devices(wanted)] or list(known[:1])
    last = max(smaller, key=lambda row: devices(row))
    return seconds_of(last) * samples(wanted) / samples(last)


def _linear(terms: Callable[[StepRow], list[float]]) -> Law:
    """A law that is linear in constants of at least zero, fitted to relative errors."""

    def law(known: Sequence[StepRow], wanted: StepRow) -> float:
        design = np.array([[term / seconds_of(row) for term in terms(row)] for row in known])
        return float(np.array(terms(wanted)) @ nnls(design, np.ones(len(known)))[0])

    return law


amdahl = _linear(lambda one: [samples(one), samples(one) * (devices(one) - 1)])
"""Throughput n / (1 + s (n - 1)), with the serial fraction s."""
_three_constants = _linear(
    lambda one: [samples(one), samples(one) * (devices(one) - 1), samples(one) * devices(one) * (devices(one) - 1)]
)


def usl(known: Sequence[StepRow], wanted: StepRow) -> float:
    """Gunther's universal scalability law, throughput n / (1 + s (n - 1) + k n (n - 1)); two rows leave k at zero."""
    return (amdahl if len(known) < 3 else _three_constants)(known, wanted)


LAWS: dict[str, Law] = {
    "ideal": ideal,
    "last step": last_step,
    "Amdahl": amdahl,
    "USL": usl,
    "ring": _linear(lambda one: [samples(one), 2 * (devices(one) - 1) / devices(one)]),
}


def cases_of(table: Table) -> list[Case]:
    return [case for subset, known, wanted in splits_of(table) for case in _cases(table, subset, known, wanted)]


def splits_of(table: Table) -> Iterator[tuple[str, list[StepRow], list[StepRow]]]:
    """Which rows are measured and which are forecast, for each way that leaves some to forecast."""
    last = len(table.rows) - 1
    for subset, places in {"two": (0, 1), "three": (0, 1, 2), "span": (0, last)}.items():
        if last + 1 > len(places):
            known = [table.rows[place] for place in places]
            yield subset, known, [row for place, row in enumerate(table.rows) if place not in places]


def _cases(
    table: Table,
    subset: str,
    known: Sequence[StepRow],
    wanted: Sequence[StepRow],
) -> Iterator[Case]:
    forecasts = predict(fit(known), wanted)
    most_nodes = max(row.num_nodes for row in known)
    for row, forecast in zip(wanted, forecasts, strict=True):
        found = {PLANNER: (forecast.total_s, forecast.low_s, forecast.high_s)}
        for name, law in LAWS.items():
            found[name] = (law(known, row), 0.0, math.inf)
        for method, (forecast_s, low_s, high_s) in found.items():
            yield Case(
                table=table.name,
                family=table.family,
                method=method,
                subset=subset,
                is_strong=table.is_strong,
                num_nodes=row.num_nodes,
                num_devices=devices(row),
                is_new_network=most_nodes == 1 < row.num_nodes,
                growth=seconds_of(row) / last_step(known, row),
                measured_s=seconds_of(row),
                forecast_s=forecast_s,
                low_s=low_s,
                high_s=high_s,
            )


SPLITS: dict[str, Callable[[Case], bool]] = {
    "weak": lambda case: not case.is_strong,
    "weak, inside a node": lambda case: not case.is_strong and case.num_nodes == 1,
    "weak, across nodes": lambda case: not case.is_strong and case.num_nodes > 1,
    "weak, first row across nodes": lambda case: not case.is_strong and case.is_new_network,
    "strong": lambda case: case.is_strong,
}


@dataclass(frozen=True)
class Score:
    """Errors of many cases; in per cent but for `width`, a factor."""

    rows: int
    median: float
    p90: float
    bias: float
    held: float
    held_where_it_grows: float
    width: float
    """Geometric mean of the high end over the low end of the interval."""

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Score:
        errors = np.array([case.error for case in cases])
        held = np.array([case.is_held for case in cases])
        grows = np.array([case.growth > GROWTH for case in cases])
        logs = [math.log(case.high_s / case.low_s) for case in cases if case.low_s > 0]
        return cls(
            rows=len(cases),
            median=100 * float(np.median(np.abs(errors))),
            p90=100 * float(np.quantile(np.abs(errors), 0.9)),
            bias=100 * float(np.median(errors)),
            held=100 * float(held.mean()),
            held_where_it_grows=100 * float(held[grows].mean()) if grows.any() else math.nan,
            width=math.exp(float(np.mean(logs))) if logs else math.nan,
        )

    def cells(self, is_planner: bool) -> list[str]:
        errors = [str(self.rows), f"{self.median:.1f}", f"{self.p90:.1f}", f"{self.bias:+.1f}"]
        interval = [f"{self.held:.0f}", f"{self.held_where_it_grows:.0f}", f"{self.width:.2f}"]
        return errors + (interval if is_planner else ["", "", ""])


HEAD = ["rows", "median, %", "90th percentile, %", "bias, %", "held, %", f"held where > {GROWTH}x, %", "width"]


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left and all others to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))


def print_scores(cases: Sequence[Case]) -> None:
    rows = []
    for subset in SUBSETS:
        for split, is_in in SPLITS.items():
            for method in (PLANNER, *LAWS):
                found = [case for case in cases if case.subset == subset and case.method == method and is_in(case)]
                if found:
                    rows.append([subset, split, method, *Score.of(found).cells(method == PLANNER)])
    print(markdown_table(["from", "split", "method", *HEAD], rows), end="\n\n")


def print_families(cases: Sequence[Case]) -> None:
    rows = []
    for family in dict.fromkeys(case.family for case in cases):
        for subset in SUBSETS:
            found = [case for case in cases if (case.family, case.subset) == (family, subset)]
            mine = [case for case in found if case.method == PLANNER]
            if not mine:
                continue
            medians = {law: float(np.median([abs(case.error) for case in found if case.method == law])) for law in LAWS}
            best = min(medians, key=lambda law: medians[law])
            rows.append([family, subset, *Score.of(mine).cells(True), f"{best} {100 * medians[best]:.1f}"])
    print(markdown_table(["family", "from", *HEAD, "best law's median, %"], rows), end="\n\n")


def print_rows(cases: Sequence[Case]) -> None:
    for case in sorted((one for one in cases if one.method == PLANNER), key=lambda one: -abs(one.error)):
        print(
            f"{case.subset:6s} {case.table:45s} {case.num_nodes:3d} nodes {case.num_devices:5d} devices "
            f"{case.measured_s:9.4g} s, forecast {case.forecast_s:9.4g} ({100 * case.error:+.0f} %), "
            f"{case.low_s:.4g} to {case.high_s:.4g}{'' if case.is_held else '  MISSED'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--only", default=None, metavar="FAMILY")
    parser.add_argument("--by-family", action="store_true", help="also each family by itself")
    parser.add_argument("--rows", action="store_true", help="also each forecast, the worst first")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    every_table = tables_of(arguments.data)
    tables = [table for table in every_table if arguments.only in (None, table.family)]
    if not tables:
        parser.error(f"--only {arguments.only}: no table of {arguments.data} is of that family")
    with Pool(arguments.processes) as pool:
        found = pool.map(cases_of, tables, chunksize=4)
    cases = [case for of_table in found for case in of_table]
    if arguments.rows:
        print_rows(cases)
    if arguments.by_family:
        print_families(cases)
    print_scores(cases)


if __name__ == "__main__":
    main()
