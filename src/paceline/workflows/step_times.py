"""Works with measured step times: fits them, forecasts other placements, suggests what to measure next."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.errors import JobError, shortened
from paceline.plan.model import Layout, StepForecast
from paceline.regular_files import read_text
from paceline.spec.algorithm import algorithm_names
from paceline.spec.job import MOST_WORKERS

if TYPE_CHECKING:
    from paceline.plan.calibrate import Calibration
    from paceline.plan.step_constants import Observation, Placement
    from paceline.plan.suggest import Suggestion

T = TypeVar("T")

_MOST_NODES = 16
"""In the range that is assumed where the file names none."""
_TINY = 1e-12


@dataclass(frozen=True)
class ContradictingRow:
    """A measured row that the other rows contradict."""

    line: int
    step_time_s: float
    forecast_s: float
    sentence: str


@dataclass(frozen=True)
class FittedSteps:
    """Forecasts of the placements that were asked for, and the fit that they come from."""

    placements: tuple[Placement, ...]
    forecasts: tuple[StepForecast, ...]
    calibration: Calibration
    contradictions: tuple[ContradictingRow, ...]

    @property
    def constants(self) -> dict[str, float]:
        return self.calibration.medians()

    @property
    def uncertain_by_factor(self) -> dict[str, float]:
        """The uncertainty of each constant as a factor (one standard deviation)."""
        return {name: math.exp(deviation) for name, deviation in self.calibration.deviations().items()}


def fit_step_times(observations: Path | str, queries: Path | str) -> FittedSteps:
    """Fit the step times in one CSV file and forecast the placements in another.

    Example: `paceline.fit_step_times("obs.csv", "q.csv").forecasts[0].total_s`.

    Args:
        observations: columns num_nodes, devices_per_node (or devices_on_node, "2+4"), micro_batch_size, step_time_s;
            if known also sync_time_s, algorithm, gradient_bytes, link_bytes_per_s.
        queries: the same without times.

    Raises:
        JobError: a file cannot be read, or has an invalid value; the message names line and column.
    """
    from paceline.plan.calibrate import predict
    from paceline.plan.contradictions import fit_without_mistakes

    measured, _ = read_observations(Path(observations))
    if not measured:
        raise JobError(f"{observations} has no row with a step_time_s; measure one device and two devices at least.")
    wanted = tuple(row.placement for row in _read(Path(queries)))
    calibration, found = fit_without_mistakes([observation for _, observation in measured])
    contradictions = []
    for one in found:
        line = measured[one.row][0]
        sentence = one.sentence(f"{observations}, line {line},")
        contradictions.append(ContradictingRow(line, one.measured_s, one.forecast_s, sentence))
    return FittedSteps(wanted, tuple(predict(calibration, wanted)), calibration, tuple(contradictions))


def suggest_measurements(observations: Path | str, budget: int = 1) -> tuple[Suggestion, ...]:
    """Which placements to measure next, in order, so that forecasts over the user's range get surer by most.

    Rows without a step_time_s are the range to choose from; without such rows it is up to 16 nodes with as many devices
    as were seen on one, at the micro-batches that were seen, or the one and smaller ones, which fit too.
    Example: `paceline.suggest_measurements("obs.csv", budget=3)`.

    Args:
        observations: as for `fit_step_times`.
        budget: how many, at least 1.

    Raises:
        JobError: the file cannot be read, has an invalid value or no rows.
    """
    from paceline.plan.suggest import suggest

    if budget < 1:
        raise JobError(f"--budget {budget} leaves nothing to suggest; use at least 1.")
    measured, unmeasured = read_observations(Path(observations))
    known = [observation for _, observation in measured]
    candidates = unmeasured or _assumed_range([observation.placement for observation in known])
    if not candidates:
        raise JobError(
            f"{observations} has no rows; write down what could be measured, a row each, with an empty step_time_s."
        )
    return tuple(suggest(known, candidates, budget))


def _assumed_range(measured: Sequence[Placement]) -> list[Placement]:
    from paceline.plan.step_constants import Placement

    most = max((max(placement.layout.workers_per_node) for placement in measured), default=0)
    sizes = sorted({placement.micro_batch_size for placement in measured})
    if len(sizes) == 1:
        sizes = sorted({max(1, sizes[0] // divisor) for divisor in (1, 2, 4)})
    per_node = sorted({count for count in (1, 2, 4, 8, 16, most) if count <= most})
    layouts = [Layout((count,) * nodes) for nodes in (1, 2, 3, 4, 6, 8, 12, _MOST_NODES) for count in per_node]
    candidates = [Placement(layout, size) for layout in layouts for size in sizes]
    known = set(measured)
    return [candidate for candidate in candidates if candidate not in known]


def read_observations(path: Path) -> tuple[list[tuple[int, Observation]], list[Placement]]:
    """The measured rows of a file, each with its line, and the placements of rows without a time."""
    from paceline.plan.step_constants import Observation

    rows = _read(path)
    measured = [
        (row.line, Observation(row.placement, row.step_time_s, row.sync_time_s))
        for row in rows
        if row.step_time_s is not None
    ]
    return measured, [row.placement for row in rows if row.step_time_s is None]


@dataclass(frozen=True)
class _Row:
    line: int
    placement: Placement
    step_time_s: float | None
    sync_time_s: float | None


def _read(path: Path) -> list[_Row]:
    """The rows of a file of placements; empty lines are skipped, columns of other names are ignored.

    Raises:
        JobError: the file cannot be read, a column is missing, or a value is invalid; names line and column.
    """
    try:
        text = io.StringIO(read_text(path, encoding="utf-8-sig"), newline="")
        reader = csv.DictReader(text, skipinitialspace=True, restval="")
        columns = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = columns
        lines = [_Line(path, reader.line_num, {name: cells[name].strip() for name in columns}) for cells in reader]
    except (OSError, ValueError, csv.Error) as problem:
        raise JobError(f"{path} cannot be read as a table of comma-separated values: {problem}.") from None
    has_layout = "devices_on_node" in columns or {"num_nodes", "devices_per_node"} <= set(columns)
    if not has_layout or "micro_batch_size" not in columns:
        raise JobError(
            f"{path} needs the columns num_nodes, devices_per_node (or devices_on_node) and micro_batch_size; "
            f"its first line has {shortened(', '.join(columns)) or 'none'}."
        )
    return [line.row() for line in lines if any(line.cells.values())]


@dataclass(frozen=True)
class _Line:
    """One line of a file; cells by the names of their columns, empty where there is none."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def row(self) -> _Row:
        from paceline.plan.step_constants import Placement

        step_time_s = self._number("step_time_s", float, _TINY, "time above zero, in seconds")
        sync_time_s = self._number("sync_time_s", float, 0, "time, in seconds")
        if step_time_s is not None and sync_time_s is not None and sync_time_s > step_time_s:
            raise self._mistake("sync_time_s", f"{sync_time_s:g} s is longer than the step of {step_time_s:g} s")
        algorithm, known = self.cells.get("algorithm") or "all_reduce", algorithm_names()
        if algorithm not in known:
            raise self._mistake("algorithm", f"{algorithm} is not known; there are {', '.join(known)}")
        placement = Placement(
            self._layout(),
            self._count("micro_batch_size"),
            algorithm,
            self._number("gradient_bytes", float, 1, "number of bytes"),
            self._number("link_bytes_per_s", float, 1, "number of bytes a second"),
        )
        return _Row(self.line, placement, step_time_s, sync_time_s)

    def _layout(self) -> Layout:
        """The layout from devices_on_node ("2+4") if it is given, else num_nodes nodes of devices_per_node."""
        listed = self.cells.get("devices_on_node", "")
        if not listed:
            devices, nodes = self._count("devices_per_node"), self._count("num_nodes")
            if devices * nodes > MOST_WORKERS:
                raise self._mistake("num_nodes", f"{devices} x {nodes} devices are more than {MOST_WORKERS}")
            return Layout((devices,) * nodes)
        counts = [count.strip() for count in listed.split("+")]
        if not all(re.fullmatch("0*[1-9][0-9]{0,5}", count) for count in counts):
            raise self._mistake("devices_on_node", f"{listed} should be the devices of each node, such as 2+4")
        if self.cells.get("num_nodes") and self._count("num_nodes") != len(counts):
            said = f"{listed} names {len(counts)} nodes, but num_nodes says {self._count('num_nodes')}"
            raise self._mistake("devices_on_node", said)
        return Layout(tuple(map(int, counts)))

    def _count(self, column: str) -> int:
        count = self._number(column, _whole, 1, "whole number from 1 on")
        if count is None:
            raise self._mistake(column, "is empty")
        return count

    def _number(self, column: str, kind: Callable[[str], T], least: float, meaning: str) -> T | None:
        """The value of a column, None where it is empty."""
        text = self.cells.get(column, "")
        if not text:
            return None
        try:
            value = kind(text)
            ok = math.isfinite(value) and value >= least  # type: ignore[arg-type, operator]
        except ValueError:
            ok = False
        if not ok:
            raise self._mistake(column, f"{text} is no {meaning}")
        return value

    def _mistake(self, column: str, what: str) -> JobError:
        return JobError(f"{self.path}, line {self.line}, {column}: {shortened(what, 200)}.")


def _whole(text: str) -> int:
    """ "4" and "4.0", which spreadsheets make of it."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(value)
