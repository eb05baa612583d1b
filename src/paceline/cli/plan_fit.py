"""What `paceline plan` does with measured steps: fit them, forecast others, say what to measure next."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.cli.console import table_console
from paceline.errors import JobError
from paceline.plan.model import Layout, StepForecast
from paceline.spec import AlgorithmName
from paceline.spec.algorithm import algorithm_names

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.plan.calibrate import Calibration, Observation, Placement
    from paceline.plan.suggest import Suggestion

T = TypeVar("T")

_MOST_NODES = 16
"""Of the range that is assumed where the file names none."""


def fit_and_predict(obs: Path, queries: Path, as_json: bool) -> None:
    """Fit the rows of `obs`, forecast those of `queries`, and print both with the constants."""
    from paceline.plan.calibrate import fit, predict

    measured, _ = _read_observations(obs)
    if not measured:
        raise JobError(f"{obs} has no row with a step_time_s; measure one device and two devices at least.")
    wanted = [row.placement for row in _read(queries)]
    calibration = fit([observation for _, observation in measured])
    forecasts = predict(calibration, wanted)
    contradictions = [
        {
            "line": measured[one.row][0],
            "step_time_s": one.measured_s,
            "forecast_s": one.forecast_s,
            "sentence": one.sentence(f"{obs}, line {measured[one.row][0]},"),
        }
        for one in calibration.outliers
    ]
    if as_json:
        predictions = [
            {**_placement_mapping(placement), **_forecast_mapping(forecast)}
            for placement, forecast in zip(wanted, forecasts, strict=True)
        ]
        answer = {
            "predictions": predictions,
            "constants": _constants_mapping(calibration),
            "uncertain_by_factor": _uncertainties(calibration),
            "gradient_bytes": calibration.gradient_bytes,
            "error": calibration.error,
            "contradictions": contradictions,
        }
        print(json.dumps(answer))
        return
    _show_forecasts(wanted, forecasts)
    _show_constants(calibration)
    for contradiction in contradictions:
        print(contradiction["sentence"])


def suggest_next(obs: Path, budget: int, as_json: bool) -> None:
    """Print which placements to measure next, in order.

    Rows of `obs` without a step_time_s are the range to choose from; without such rows it is up to 16 nodes with as
    many devices as were seen on one, at the micro-batches that were seen, or the one and smaller ones, which fit too.
    """
    from paceline.plan.suggest import suggest

    if budget < 1:
        raise JobError(f"--budget {budget} leaves nothing to suggest; use at least 1.")
    measured, unmeasured = _read_observations(obs)
    observations = [observation for _, observation in measured]
    candidates = unmeasured or _assumed_range([observation.placement for observation in observations])
    if not candidates:
        raise JobError(f"{obs} has no rows; write down what could be measured, a row each, with an empty step_time_s.")
    suggestions = suggest(observations, candidates, budget)
    if as_json:
        rows = [
            {**_placement_mapping(suggestion.placement), "expected_error": suggestion.expected_error}
            for suggestion in suggestions
        ]
        print(json.dumps({"suggestions": rows}))
        return
    _show_suggestions(suggestions)


def _assumed_range(measured: Sequence[Placement]) -> list[Placement]:
    from paceline.plan.calibrate import Placement

    most = max((max(placement.layout.workers_per_node) for placement in measured), default=0)
    sizes = sorted({placement.micro_batch_size for placement in measured})
    if len(sizes) == 1:
        sizes = sorted({max(1, sizes[0] // part) for part in (1, 2, 4)})
    per_node = sorted({count for count in (1, 2, 4, 8, 16, most) if count <= most})
    layouts = [Layout((count,) * nodes) for nodes in (1, 2, 3, 4, 6, 8, 12, _MOST_NODES) for count in per_node]
    candidates = [Placement(layout, size) for layout in layouts for size in sizes]
    known = set(measured)
    return [candidate for candidate in candidates if candidate not in known]


@dataclass(frozen=True)
class _FitRow:
    """One row of a file."""

    line: int
    placement: Placement
    step_time_s: float | None
    sync_time_s: float | None


def _read_observations(path: Path) -> tuple[list[tuple[int, Observation]], list[Placement]]:
    """What was measured, with the line of each, and what was not."""
    from paceline.plan.calibrate import Observation

    rows = _read(path)
    measured = [
        (row.line, Observation(row.placement, row.step_time_s, row.sync_time_s))
        for row in rows
        if row.step_time_s is not None
    ]
    return measured, [row.placement for row in rows if row.step_time_s is None]


def _read(path: Path) -> list[_FitRow]:
    """The rows of a file of placements; empty lines are skipped, columns of other names are not looked at.

    Raises:
        JobError: the file cannot be read, a column is missing, or a value cannot be meant; names line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            lines = [(reader.line_num, {key: value for key, value in row.items() if key}) for row in reader]
    except (OSError, ValueError, csv.Error) as problem:
        raise JobError(f"{path} cannot be read as a table of comma-separated values: {problem}.") from None
    has_layout = "devices_on_node" in columns or {"num_nodes", "devices_per_node"} <= set(columns)
    if not has_layout or "micro_batch_size" not in columns:
        raise JobError(
            f"{path} needs the columns num_nodes, devices_per_node (or devices_on_node) and micro_batch_size; "
            f"its first line has {', '.join(columns) or 'none'}."
        )
    return [_row(_Cells(path, line, values)) for line, values in lines if any(map(_text, values.values()))]


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


@dataclass(frozen=True)
class _Cells:
    """One line by the names of its columns."""

    path: Path
    line: int
    values: dict[str, Any]

    def number(self, column: str, kind: Callable[[str], T], least: float, meaning: str) -> T | None:
        """The value of a column, None where it is empty."""
        text = _text(self.values.get(column))
        if not text:
            return None
        try:
            value = kind(text)
            ok = math.isfinite(value) and value >= least  # type: ignore[arg-type, operator]
        except ValueError:
            ok = False
        if not ok:
            raise self.mistake(column, f"{text} is no {meaning}")
        return value

    def count(self, column: str) -> int | None:
        return self.number(column, _whole, 1, "whole number from 1 on")

    def needed_count(self, column: str) -> int:
        count = self.count(column)
        if count is None:
            raise self.mistake(column, "is empty")
        return count

    def mistake(self, column: str, what: str) -> JobError:
        return JobError(f"{self.path}, line {self.line}, {column}: {what}.")


def _whole(text: str) -> int:
    """ "4" and "4.0", which spreadsheets make of it."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


_TINY = 1e-12


def _row(cells: _Cells) -> _FitRow:
    from paceline.plan.calibrate import Placement

    step_time_s = cells.number("step_time_s", float, _TINY, "time above zero, in seconds")
    sync_time_s = cells.number("sync_time_s", float, 0, "time, in seconds")
    if step_time_s is not None and sync_time_s is not None and sync_time_s > step_time_s:
        raise cells.mistake("sync_time_s", f"{sync_time_s:g} s is longer than the step of {step_time_s:g} s")
    algorithm = _text(cells.values.get("algorithm")) or "all_reduce"
    known = algorithm_names()
    if algorithm not in known:
        raise cells.mistake("algorithm", f"{algorithm} is not known; there are {', '.join(known)}")
    name: AlgorithmName = algorithm
    placement = Placement(
        _layout(cells),
        cells.needed_count("micro_batch_size"),
        name,
        cells.number("gradient_bytes", float, 1, "number of bytes"),
        cells.number("link_bytes_per_s", float, 1, "number of bytes a second"),
    )
    return _FitRow(cells.line, placement, step_time_s, sync_time_s)


def _layout(cells: _Cells) -> Layout:
    """From devices_on_node ("2+4") where it is filled in, else num_nodes nodes of devices_per_node."""
    listed = _text(cells.values.get("devices_on_node"))
    num_nodes = cells.count("num_nodes")
    if not listed:
        return Layout((cells.needed_count("devices_per_node"),) * cells.needed_count("num_nodes"))
    parts = [part.strip() for part in listed.split("+")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise cells.mistake("devices_on_node", f"{listed} should be the devices of each node, such as 2+4")
    if num_nodes not in (None, len(parts)):
        raise cells.mistake("devices_on_node", f"{listed} names {len(parts)} nodes, but num_nodes says {num_nodes}")
    return Layout(tuple(map(int, parts)))


def _placement_mapping(placement: Placement) -> dict[str, Any]:
    """The columns that a row of a file would have; devices_per_node is null where nodes differ."""
    counts = placement.layout.workers_per_node
    return {
        "num_nodes": len(counts),
        "devices_per_node": counts[0] if len(set(counts)) == 1 else None,
        "devices_on_node": _devices_on_node(placement.layout),
        "micro_batch_size": placement.micro_batch_size,
        "algorithm": placement.algorithm,
        **({} if placement.gradient_bytes is None else {"gradient_bytes": placement.gradient_bytes}),
        **({} if placement.link_bytes_per_s is None else {"link_bytes_per_s": placement.link_bytes_per_s}),
    }


def _forecast_mapping(forecast: StepForecast) -> dict[str, Any]:
    return {
        "step_time_s": forecast.total_s,
        "low_s": forecast.low_s,
        "high_s": forecast.high_s,
        "bound_by": forecast.bound_by,
        "compute_s": forecast.compute_s,
        "communication_s": forecast.communication_s,
        "exposed_s": forecast.exposed_s,
        "overhead_s": forecast.overhead_s,
    }


def _constants_mapping(calibration: Calibration) -> dict[str, float]:
    return dataclasses.asdict(calibration.constants)


def _uncertainties(calibration: Calibration) -> dict[str, float]:
    """The factor by which each constant may be wrong, two times of three."""
    return {name: math.exp(calibration.relative_deviation(name)) for name in _constants_mapping(calibration)}


def _devices_on_node(layout: Layout) -> str:
    return "+".join(map(str, layout.workers_per_node))


def _where(layout: Layout) -> str:
    """ "16 x 4" for many equal nodes, else "2+4"."""
    counts = set(layout.workers_per_node)
    listed = _devices_on_node(layout)
    if len(counts) == 1 and layout.num_nodes > 1:
        return f"{layout.num_nodes} x {counts.pop()}"
    return listed


def _show_forecasts(wanted: Sequence[Placement], forecasts: Sequence[StepForecast]) -> None:
    from rich.table import Table

    table = Table("nodes x devices", "micro-batch", "step", "9 times of 10", "samples/s", "bound by", box=None)
    for placement, forecast in zip(wanted, forecasts, strict=True):
        num_samples = placement.micro_batch_size * placement.layout.num_workers
        table.add_row(
            _where(placement.layout),
            str(placement.micro_batch_size),
            f"{forecast.total_s:.4g} s",
            f"{forecast.low_s:.4g} … {forecast.high_s:.4g} s",
            f"{num_samples / forecast.total_s:.4g}",
            forecast.bound_by,
        )
    _print(table)


def _show_constants(calibration: Calibration) -> None:
    from rich.table import Table

    table = Table("constant", "fitted", "uncertain by a factor of", box=None)
    factors = _uncertainties(calibration)
    for name, value in _constants_mapping(calibration).items():
        table.add_row(name, f"{value:.3g}", f"{factors[name]:.2f}")
    _print(table)
    print(f"The rows differ from the fit by {100 * calibration.error:.1f} % (standard deviation).")


def _show_suggestions(suggestions: Sequence[Suggestion]) -> None:
    from rich.table import Table

    table = Table("measure", "nodes x devices", "micro-batch", "then forecasts are off by about", box=None)
    for number, suggestion in enumerate(suggestions, 1):
        table.add_row(
            str(number),
            _where(suggestion.placement.layout),
            str(suggestion.placement.micro_batch_size),
            f"{100 * suggestion.expected_error:.0f} %",
        )
    _print(table)


def _print(table: Table) -> None:
    table_console(pipe_columns=120).print(table)
