"""Forecasts of published scaling tables from their first rows, beside simpler laws.

    python -m benchmarks.forecast_tables --data DIR [--leave-one-out] [--by-family] [--rows] [--only FAMILY]

DIR holds one CSV a table, as `paceline plan --fit` reads it, and index.json with the family of each table. A table is
forecast from its first two rows, from its first three, and from its first and last row ("span"). With
`--leave-one-out` the priors of a family's forecasts are chosen by the other families alone (`prior_choice`), all of
them with `--only` too; without, they are those of the planner. `--by-family` shows the families one by one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from multiprocessing.pool import Pool as WorkerPool
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from paceline.plan.calibrate import fit, predict
from paceline.plan.step_constants import USUAL, Observation, Placement, Prior
from paceline.report.tables import markdown_table
from paceline.workflows.step_time_files import read_observations

from .prior_choice import CHOSEN, START, Evidence, best_choice, evidence_of, priors_at

SUBSETS = ("two", "three", "span")
PLANNER = "planner"
GROWTH = 1.3
"""A step that takes this many times as long as the last measured one, for the same samples, is hard to foresee."""


@dataclass(frozen=True)
class Table:
    name: str
    family: str
    rows: tuple[Observation, ...]

    @property
    def is_strong(self) -> bool:
        return len({row.placement.micro_batch_size for row in self.rows}) > 1


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
    return [
        Table(name, entry["family"], tuple(row for _, row in read_observations(folder / f"{name}.csv")[0]))
        for name, entry in index.items()
    ]


def samples(placement: Placement) -> float:
    return float(placement.micro_batch_size)


def devices(placement: Placement) -> int:
    return placement.layout.num_workers


Law = Callable[[Sequence[Observation], Placement], float]


def ideal(known: Sequence[Observation], wanted: Placement) -> float:
    first = known[0]
    return first.step_time_s * samples(wanted) / samples(first.placement)


def last_step(known: Sequence[Observation], wanted: Placement) -> float:
    """The time for a sample of the largest measured row that is smaller, whatever more devices cost."""
    smaller = [row for row in known if devices(row.placement) <= devices(wanted)] or list(known[:1])
    last = max(smaller, key=lambda row: devices(row.placement))
    return last.step_time_s * samples(wanted) / samples(last.placement)


def _linear(terms: Callable[[Placement], list[float]]) -> Law:
    """A law that is linear in constants of at least zero, fitted to relative errors."""

    def law(known: Sequence[Observation], wanted: Placement) -> float:
        design = np.array([[term / row.step_time_s for term in terms(row.placement)] for row in known])
        return float(np.array(terms(wanted)) @ nnls(design, np.ones(len(known)))[0])

    return law


amdahl = _linear(lambda one: [samples(one), samples(one) * (devices(one) - 1)])
"""Throughput n / (1 + s (n - 1)), with the serial fraction s."""
_three_constants = _linear(
    lambda one: [samples(one), samples(one) * (devices(one) - 1), samples(one) * devices(one) * (devices(one) - 1)]
)


def usl(known: Sequence[Observation], wanted: Placement) -> float:
    """Gunther's universal scalability law, throughput n / (1 + s (n - 1) + k n (n - 1)); two rows leave k at zero."""
    return (amdahl if len(known) < 3 else _three_constants)(known, wanted)


LAWS: dict[str, Law] = {
    "ideal": ideal,
    "last step": last_step,
    "Amdahl": amdahl,
    "USL": usl,
    "ring": _linear(lambda one: [samples(one), 2 * (devices(one) - 1) / devices(one)]),
}


def cases_of(table: Table, usual: Mapping[str, Prior] = USUAL) -> list[Case]:
    return [case for subset, known, wanted in splits_of(table) for case in _cases(table, subset, known, wanted, usual)]


def splits_of(table: Table) -> Iterator[tuple[str, list[Observation], list[Observation]]]:
    """Which rows are measured and which are forecast, for each way that leaves some to forecast."""
    last = len(table.rows) - 1
    for subset, places in {"two": (0, 1), "three": (0, 1, 2), "span": (0, last)}.items():
        if last + 1 > len(places):
            known = [table.rows[place] for place in places]
            yield subset, known, [row for place, row in enumerate(table.rows) if place not in places]


def _cases(
    table: Table,
    subset: str,
    known: Sequence[Observation],
    wanted: Sequence[Observation],
    usual: Mapping[str, Prior],
) -> Iterator[Case]:
    forecasts = predict(fit(known, usual), [row.placement for row in wanted])
    most_nodes = max(row.placement.layout.num_nodes for row in known)
    for row, forecast in zip(wanted, forecasts, strict=True):
        found = {PLANNER: (forecast.total_s, forecast.low_s, forecast.high_s)}
        for name, law in LAWS.items():
            found[name] = (law(known, row.placement), 0.0, math.inf)
        for method, (forecast_s, low_s, high_s) in found.items():
            yield Case(
                table=table.name,
                family=table.family,
                method=method,
                subset=subset,
                is_strong=table.is_strong,
                num_nodes=row.placement.layout.num_nodes,
                num_devices=devices(row.placement),
                is_new_network=most_nodes == 1 < row.placement.layout.num_nodes,
                growth=row.step_time_s / last_step(known, row.placement),
                measured_s=row.step_time_s,
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


def evidence_of_table(table: Table) -> list[Evidence]:
    return [evidence_of(table.family, table.name, known, wanted) for _, known, wanted in splits_of(table)]


def chosen_without(pool: WorkerPool, tables: Sequence[Table], families: Sequence[str]) -> dict[str, dict[str, Prior]]:
    """For each of `families` the priors that all other families choose; prints them beside those that all choose."""
    evidence = [one for found in pool.map(evidence_of_table, tables, chunksize=4) for one in found]
    of_all = best_choice(evidence)
    without = [best_choice([one for one in evidence if one.family != family], of_all) for family in families]
    chosen = {family: priors_at(choice) for family, choice in zip(families, without, strict=True)}
    rows = []
    for name in CHOSEN:
        cells = [name]
        for what in ("median", "deviation"):
            values = [getattr(priors[name], what) for priors in chosen.values()]
            start, best, now = (getattr(priors[name], what) for priors in (START, priors_at(of_all), USUAL))
            cells += [f"{start:.3g}", f"{best:.3g}", f"{min(values):.3g} to {max(values):.3g}", f"{now:.3g}"]
        rows.append(cells)
    kinds = ("start", "of all", "without one", "in use")
    print(
        markdown_table(["constant", *(f"{what}: {kind}" for what in ("median", "deviation") for kind in kinds)], rows),
        end="\n\n",
    )
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--only", default=None, metavar="FAMILY")
    parser.add_argument("--by-family", action="store_true", help="also each family by itself")
    parser.add_argument("--rows", action="store_true", help="also each forecast, the worst first")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="choose priors without a family before forecasting its tables"
    )
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    every_table = tables_of(arguments.data)
    tables = [table for table in every_table if arguments.only in (None, table.family)]
    families = list(dict.fromkeys(table.family for table in tables))
    if not tables:
        parser.error(f"--only {arguments.only}: no table of {arguments.data} is of that family")
    with Pool(arguments.processes) as pool:
        usual_of = chosen_without(pool, every_table, families) if arguments.leave_one_out else {}
        jobs = [(table, usual_of.get(table.family, dict(USUAL))) for table in tables]
        found = pool.starmap(cases_of, jobs, chunksize=4)
    cases = [case for of_table in found for case in of_table]
    if arguments.rows:
        print_rows(cases)
    if arguments.by_family:
        print_families(cases)
    print_scores(cases)


if __name__ == "__main__":
    main()
