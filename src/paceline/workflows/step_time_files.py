"""Reads files of measured step times: one placement a line, with its time where it was measured."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import InvalidFileError, shortened
from paceline.plan.model import Layout
from paceline.regular_files import read_text
from paceline.spec.algorithm import algorithm_names
from paceline.spec.job import MOST_WORKERS

if TYPE_CHECKING:
    from paceline.plan.step_constants import Observation, Placement

T = TypeVar("T")

_TINY = 1e-12


def read_observations(path: Path) -> tuple[list[tuple[int, Observation]], list[Placement]]:
    """The measured rows of a file, each with its line, and the placements of rows without a time."""
    rows = _read(path)
    measured = [(line, observation) for line, _, observation in rows if observation is not None]
    return measured, [placement for _, placement, observation in rows if observation is None]


def read_placements(path: Path) -> list[Placement]:
    """The placements of all rows of a file."""
    return [placement for _, placement, _ in _read(path)]


def _read(path: Path) -> list[tuple[int, Placement, Observation | None]]:
    """The line, the placement and, where there is one, the measurement of every row of a file.

    Empty lines are skipped, columns of other names are ignored.

    Raises:
        InvalidFileError: the file cannot be read, a column is missing or there twice, or a value is invalid; the
            message names line and column.
    """
    try:
        text = read_text(path, encoding="utf-8-sig")
        first = text.partition("\n")[0]
        delimiter = max(",;\t", key=first.count)  # a comma where none of them is there
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, restval="", delimiter=delimiter)
        columns = [name.strip().lower() for name in reader.fieldnames or []]
        reader.fieldnames = columns
        lines = [_Line(path, reader.line_num, cells, delimiter != ",") for cells in reader]
    except (OSError, ValueError, csv.Error) as problem:
        raise InvalidFileError(f"{path} cannot be read as a table of comma-separated values: {problem}.") from None
    has_layout = "devices_on_node" in columns or {"num_nodes", "devices_per_node"} <= set(columns)
    if not has_layout or "micro_batch_size" not in columns:
        raise InvalidFileError(
            f"{path} needs the columns num_nodes, devices_per_node (or devices_on_node) and micro_batch_size; "
            f"its first line has {shortened(', '.join(columns)) or 'none'}."
        )
    if twice := [name for name, count in Counter(filter(None, columns)).items() if count > 1]:
        raise InvalidFileError(f"{path} has more than one column {twice[0]}; leave one of them.")
    return [line.row() for line in lines if line.has_values()]


@dataclass(frozen=True)
class _Line:
    """One line of a file; cells by the names of their columns, empty where there is none."""

    path: Path
    line: int
    cells: Mapping[str | None, Any]
    """Texts; under None the list of those beyond the last column."""
    has_decimal_commas: bool
    """Whether a comma in a number may be a decimal one, for it is not what divides columns."""

    def has_values(self) -> bool:
        return any(map(self._text, self.cells)) or self._has_more_cells()

    def _text(self, column: str | None) -> str:
        return "" if column is None else self.cells.get(column, "").strip()

    def _has_more_cells(self) -> bool:
        return any(cell.strip() for cell in self.cells.get(None, ()))

    def row(self) -> tuple[int, Placement, Observation | None]:
        from paceline.plan.step_constants import Observation, Placement

        if self._has_more_cells():  # a decimal comma divides a number into two cells, of which one would be read
            raise InvalidFileError(
                f"{self.path}, line {self.line} has more cells than the first line has columns; write numbers with a "
                "decimal point, or separate columns by semicolons."
            )
        step_time_s = self._number("step_time_s", float, _TINY, "time above zero, in seconds")
        sync_time_s = self._number("sync_time_s", float, 0, "time, in seconds")
        if step_time_s is not None and sync_time_s is not None and sync_time_s > step_time_s:
            raise self._mistake("sync_time_s", f"{sync_time_s:g} s is longer than the step of {step_time_s:g} s")
        algorithm, known = self._text("algorithm") or "all_reduce", algorithm_names()
        if algorithm not in known:
            raise self._mistake("algorithm", f"{algorithm} is not known; there are {', '.join(known)}")
        layout, micro_batch_size = self._layout(), self._count("micro_batch_size")
        placement = Placement(
            layout,
            micro_batch_size,
            algorithm,
            self._number("gradient_bytes", float, 1, "number of bytes"),
            self._number("link_bytes_per_s", float, 1, "number of bytes a second"),
            self._num_passes(layout.num_workers * micro_batch_size),
        )
        observation = None if step_time_s is None else Observation(placement, step_time_s, sync_time_s)
        return self.line, placement, observation

    def _layout(self) -> Layout:
        """The layout from devices_on_node ("2+4") if it is given, else num_nodes nodes of devices_per_node."""
        listed = self._text("devices_on_node")
        if not listed:
            devices, nodes = self._count("devices_per_node"), self._count("num_nodes")
            if devices * nodes > MOST_WORKERS:
                raise self._mistake("num_nodes", f"{devices} x {nodes} devices are more than {MOST_WORKERS}")
            return Layout((devices,) * nodes)
        counts = [count.strip() for count in listed.split("+")]
        if not all(re.fullmatch("0*[1-9][0-9]{0,5}", count) for count in counts):
            raise self._mistake("devices_on_node", f"{listed} should be the devices of each node, such as 2+4")
        if self._text("num_nodes") and self._count("num_nodes") != len(counts):
            said = f"{listed} names {len(counts)} nodes, but num_nodes says {self._count('num_nodes')}"
            raise self._mistake("devices_on_node", said)
        return Layout(tuple(map(int, counts)))

    def _num_passes(self, samples_of_a_pass: int) -> int:
        """Passes that accumulate gradients: as the column says, or what makes the global batch; 1 where neither is."""
        told = self._number("grad_accum_steps", _whole, 1, "whole number from 1 on")
        batch = self._number("global_batch_size", _whole, 1, "whole number from 1 on")
        if batch is None:
            return told or 1
        passes = max(1, round(batch / samples_of_a_pass))
        if passes * samples_of_a_pass != batch:
            said = f"{batch} is no multiple of the {samples_of_a_pass} samples that all devices pass at once"
            raise self._mistake("global_batch_size", said)
        if told not in (None, passes):
            raise self._mistake("grad_accum_steps", f"{told} contradicts global_batch_size, which makes {passes}")
        return passes

    def _count(self, column: str) -> int:
        count = self._number(column, _whole, 1, "whole number from 1 on")
        if count is None:
            raise self._mistake(column, "is empty")
        return count

    def _number(self, column: str, kind: Callable[[str], T], least: float, meaning: str) -> T | None:
        """The value of a column, None where it is empty."""
        text = self._text(column)
        if not text:
            return None
        if self.has_decimal_commas:
            text = text.replace(",", ".")
        try:
            value = kind(text)
            ok = math.isfinite(value) and value >= least  # type: ignore[arg-type, operator]
        except ValueError:
            ok = False
        if not ok:
            raise self._mistake(column, f"{text} is not a {meaning}")
        return value

    def _mistake(self, column: str, what: str) -> InvalidFileError:
        return InvalidFileError(f"{self.path}, line {self.line}, {column}: {shortened(what, 200)}.")


def _whole(text: str) -> int:
    """ "4" and "4.0", which spreadsheets make of it."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(value)
