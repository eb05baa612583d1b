"""Reads files of measured step times: one placement a line, with its time where it was measured."""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import InvalidFileError, file_problems, shortened
from paceline.plan.model import Layout
from paceline.regular_files import read_text
from paceline.spec.algorithm import algorithm_names
from paceline.spec.job import MOST_SAMPLES, MOST_WORKERS

if TYPE_CHECKING:
    from paceline.plan.step_constants import Observation, Placement

T = TypeVar("T", int, float)

COLUMNS = (
    *("num_nodes", "devices_per_node", "devices_on_node", "micro_batch_size", "step_time_s", "sync_time_s"),
    *("grad_accum_steps", "global_batch_size", "algorithm", "gradient_bytes", "link_bytes_per_s"),
)
_NEAR = 0.75
"""How alike a column's name and one of these are where the one was meant: "grad_accum", "step_time_ms"."""
_SHORTEST_S, _LONGEST_S = 1e-12, 1e9
_MOST_BYTES = 1e18
_LEADING = re.compile(r"(?:[\s,;]*\n|[ \t]*#[^\n]*\n|sep=(?P<delimiter>[,;\t])[\s,;]*\n)*")
"""What may stand above the first line: empty lines, comments, and the line by which Excel knows the delimiter."""
_THOUSANDS = re.compile(r"\d{1,3}([.,]\d{3})+")


def read_observations(path: Path, *, need_times: bool = False) -> tuple[list[tuple[int, Observation]], list[Placement]]:
    """The measured rows of a file, each with its line, and the placements of rows without a time.

    Args:
        need_times: refuse a file without a measured row.
    """
    rows = _read(path, need_times=need_times)
    if need_times and all(observation is None for *_, observation in rows):
        raise InvalidFileError(f"{path} has no row with a step_time_s; measure one device and two devices at least.")
    measured = [(line, observation) for line, _, observation in rows if observation is not None]
    return measured, [placement for _, placement, observation in rows if observation is None]


def read_placements(path: Path) -> list[Placement]:
    """The placements of all rows of a file."""
    return [placement for _, placement, _ in _read(path)]


def _read(path: Path, *, need_times: bool = False) -> list[tuple[int, Placement, Observation | None]]:
    """The line, the placement and, where there is one, the measurement of every row of a file.

    Empty lines and those that begin with "#" are skipped, columns of other names are ignored.

    Args:
        need_times: whether there must be a column of them.

    Raises:
        InvalidFileError: the file cannot be read, a column is missing, misspelt or there twice, or a value is invalid;
            the message names line and column.
    """
    what = f"{path} cannot be read as a table of comma-separated values"
    with file_problems(what, InvalidFileError):
        text = read_text(path).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    leading = _LEADING.match(text)
    above, told = (leading[0], leading["delimiter"]) if leading else ("", None)
    table = text[len(above) :]
    first = table.partition("\n")[0]
    delimiter = told or max(",;\t", key=first.count)  # a comma where none of them is there
    try:
        reader = csv.DictReader(
            io.StringIO(table, newline=""), skipinitialspace=True, restval="", delimiter=delimiter, strict=True
        )
        columns = [name.strip().lower() for name in reader.fieldnames or []]
        reader.fieldnames = columns
        skipped = above.count("\n")
        lines = [_Line(path, skipped + reader.line_num, cells, delimiter != ",") for cells in reader]
    except csv.Error as problem:
        raise InvalidFileError(f"{what}: {_reason(problem)}.") from None
    _check_columns(path, columns, need_times)
    return [line.row() for line in lines if line.has_values()]


def _reason(problem: csv.Error) -> str:
    return "a quotation mark is not closed" if "unexpected end" in str(problem) else str(problem)


def _check_columns(path: Path, columns: Sequence[str], need_times: bool) -> None:
    """Columns that are missing, misspelt or there twice."""
    if twice := [name for name, count in Counter(filter(None, columns)).items() if count > 1]:
        raise InvalidFileError(f"{path} has more than one column {_in_a_line(twice[0])}; leave one of them.")
    missing = [name for name in COLUMNS if name not in columns]
    for column in columns:
        near = [] if column in COLUMNS else difflib.get_close_matches(column, missing, 1, _NEAR)
        if near:
            raise InvalidFileError(
                f"{path} has a column {_in_a_line(column)} and none {near[0]}; write {near[0]} if you mean it, with "
                "values in its unit, else leave that column out."
            )
    has_layout = "devices_on_node" in columns or {"num_nodes", "devices_per_node"} <= set(columns)
    if not has_layout or "micro_batch_size" not in columns:
        names = "columns num_nodes, devices_per_node (or devices_on_node) and micro_batch_size"
    elif need_times and "step_time_s" not in columns:
        names = "column step_time_s"
    else:
        return
    has = _in_a_line(", ".join(columns)) or "none"
    raise InvalidFileError(f"{path} needs the {names}; its first line has {has}.")


def _in_a_line(text: str) -> str:
    """A text of a file, short and without line ends."""
    return shortened(" ".join(text.split()), 200)


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
        """Whether it is a row, and not empty or a comment."""
        is_comment = self._text(next(iter(self.cells), None)).startswith("#")
        return not is_comment and (any(map(self._text, self.cells)) or self._has_more_cells())

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
        step_time_s = self._number("step_time_s", float, _SHORTEST_S, _LONGEST_S, "time above zero, in seconds")
        sync_time_s = self._number("sync_time_s", float, 0, _LONGEST_S, "time, in seconds")
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
            self._bytes("gradient_bytes", "number of bytes"),
            self._bytes("link_bytes_per_s", "number of bytes a second"),
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
        layout = Layout(tuple(map(int, counts)))
        if layout.num_workers > MOST_WORKERS:
            raise self._mistake("devices_on_node", f"{listed} are more than {MOST_WORKERS} devices")
        if self._text("num_nodes") and self._count("num_nodes") != layout.num_nodes:
            said = f"{listed} names {layout.num_nodes} nodes, but num_nodes says {self._count('num_nodes')}"
            raise self._mistake("devices_on_node", said)
        if self._text("devices_per_node") and {self._count("devices_per_node")} != set(layout.workers_per_node):
            said = f"{listed} contradicts devices_per_node, which says {self._count('devices_per_node')}"
            raise self._mistake("devices_on_node", said)
        return layout

    def _num_passes(self, samples_of_a_pass: int) -> int:
        """Passes that accumulate gradients: as the column says, or what makes the global batch; 1 where neither is."""
        told, batch = self._whole_number("grad_accum_steps"), self._whole_number("global_batch_size")
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
        count = self._whole_number(column)
        if count is None:
            raise self._mistake(column, "is empty")
        return count

    def _whole_number(self, column: str) -> int | None:
        self._refuse_thousands(column)
        return self._number(column, _whole, 1, MOST_SAMPLES, "whole number from 1 on")

    def _bytes(self, column: str, meaning: str) -> float | None:
        self._refuse_thousands(column)
        return self._number(column, float, 1, _MOST_BYTES, meaning)

    def _refuse_thousands(self, column: str) -> None:
        """In a column of whole numbers "1,000" is a thousand for one reader and one for another."""
        text = self._text(column)
        if _THOUSANDS.fullmatch(text):
            raise self._mistake(column, f"{text} may have a separator of thousands; write the number without one")

    def _number(self, column: str, kind: Callable[[str], T], least: float, most: float, meaning: str) -> T | None:
        """The value of a column, None where it is empty."""
        text = self._text(column)
        if not text:
            return None
        if self.has_decimal_commas:
            text = text.replace(",", ".")
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            raise self._mistake(column, f"{text} is not a {meaning}")
        if value > most:
            raise self._mistake(column, f"{text} is more than can be meant, {most:g} at most")
        return value

    def _mistake(self, column: str, what: str) -> InvalidFileError:
        return InvalidFileError(f"{self.path}, line {self.line}, {column}: {_in_a_line(what)}.")


def _whole(text: str) -> int:
    """ "4" and "4.0", which spreadsheets make of it."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(value)
