"""Reads tables of steps: one step a line, with its time where it was measured."""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidFileError, file_problems, shortened
from paceline.regular_files import read_text
from paceline.spec import StepRow
from paceline.spec.algorithm import algorithm_names
from paceline.spec.job import MOST_SAMPLES, MOST_WORKERS


class _Numbers(NamedTuple):
    """What the numbers of a column may be."""

    least: float
    most: float
    meaning: str
    is_whole: bool = False
    has_units: bool = False
    """Whether "1,000" may be a thousand in it, and so is refused."""


_COUNTS = _Numbers(1, MOST_SAMPLES, "whole number from 1 on", is_whole=True, has_units=True)
_COLUMNS: Mapping[str, _Numbers | None] = {
    "num_nodes": _COUNTS,
    "devices_per_node": _COUNTS,
    "devices_on_node": None,
    "micro_batch_size": _COUNTS,
    "step_time_s": _Numbers(1e-12, 1e9, "time above zero, in seconds"),
    "sync_time_s": _Numbers(0, 1e9, "time, in seconds"),
    "grad_accum_steps": _COUNTS,
    "global_batch_size": _COUNTS,
    "algorithm": None,
    "gradient_bytes": _Numbers(1, 1e18, "number of bytes", has_units=True),
    "link_bytes_per_s": _Numbers(1, 1e18, "number of bytes a second", has_units=True),
}
"""The columns that are read; None: texts."""
_NEAR = 0.75
"""How alike a column's name and one of these are where the one was meant: "grad_accum", "step_time_ms"."""
_LEADING = re.compile(r"(?:[\s,;]*\n|[ \t]*#[^\n]*\n|sep=(?P<delimiter>[,;\t])[\s,;]*\n)*")
"""What may stand above the first line: empty lines, comments, and the line by which Excel knows the delimiter."""
_THOUSANDS = re.compile(r"\d{1,3}([.,]\d{3})+")


def read_rows(path: Path) -> list[StepRow]:
    """The rows of a file; those without a time are steps that a forecast is asked for.

    Empty lines and those that begin with "#" are skipped, columns of other names are ignored.

    Raises:
        InvalidFileError: the file cannot be read, has no measured row, a column is missing, misspelt or there twice, or
            a value is invalid; the message names line and column.
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
        lines = [(above.count("\n") + reader.line_num, cells) for cells in reader]
    except csv.Error as problem:
        reason = "a quotation mark is not closed" if "unexpected end" in str(problem) else str(problem)
        raise InvalidFileError(f"{what}: {reason}.") from None
    _check_columns(path, columns)
    rows = [_Line(path, line, cells, delimiter).row() for line, cells in lines if _has_values(cells)]
    if all(row.step_time_s is None for row in rows):
        raise InvalidFileError(f"{path} has no row with a step_time_s; measure one device and two devices at least.")
    return rows


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    """Columns that are missing, misspelt or there twice."""
    if twice := [name for name, count in Counter(filter(None, columns)).items() if count > 1]:
        raise InvalidFileError(f"{path} has more than one column {_in_a_line(twice[0])}; leave one of them.")
    missing = [name for name in _COLUMNS if name not in columns]
    for column in columns:
        near = [] if column in _COLUMNS else difflib.get_close_matches(column, missing, 1, _NEAR)
        if near:
            raise InvalidFileError(
                f"{path} has a column {_in_a_line(column)} and none {near[0]}; write {near[0]} if you mean it, with "
                "values in its unit, else leave that column out."
            )
    has_layout = "devices_on_node" in columns or {"num_nodes", "devices_per_node"} <= set(columns)
    if has_layout and {"micro_batch_size", "step_time_s"} <= set(columns):
        return
    raise InvalidFileError(
        f"{path} needs the columns num_nodes, devices_per_node (or devices_on_node), micro_batch_size and step_time_s; "
        f"its first line has {_in_a_line(', '.join(columns)) or 'none'}."
    )


def _in_a_line(text: str) -> str:
    """A text of a file, short and without line ends."""
    return shortened(" ".join(text.split()), 200)


def _has_values(cells: Mapping[str | None, Any]) -> bool:
    """Whether it is a row, and not empty or a comment."""
    texts = [*(cell for name, cell in cells.items() if name is not None), *cells.get(None, ())]
    return any(cell.strip() for cell in texts) and not texts[0].strip().startswith("#")


class _Line:
    """One line of a file; cells by the names of their columns, empty where there is none."""

    def __init__(self, path: Path, line: int, cells: Mapping[str | None, Any], delimiter: str) -> None:
        self._where = f"{path}, line {line}"
        if any(cell.strip() for cell in cells.get(None, ())):
            # A decimal comma divides a number into two cells, of which one would be read.
            raise InvalidFileError(
                f"{self._where} has more cells than the first line has columns; write numbers with a decimal point, or "
                "separate columns by semicolons."
            )
        self._texts = {str(name): cell.strip() for name, cell in cells.items() if name is not None}
        self._has_decimal_commas = delimiter != ","

    def row(self) -> StepRow:
        step_time_s, sync_time_s = self._number("step_time_s"), self._number("sync_time_s")
        if step_time_s is not None and sync_time_s is not None and sync_time_s > step_time_s:
            raise self._mistake("sync_time_s", f"{sync_time_s:g} s is longer than the step of {step_time_s:g} s")
        algorithm, known = self._texts.get("algorithm") or "all_reduce", algorithm_names()
        if algorithm not in known:
            raise self._mistake("algorithm", f"{algorithm} is not known; there are {', '.join(known)}")
        layout, micro_batch_size = self._layout(), self._count("micro_batch_size")
        return StepRow(
            layout,
            micro_batch_size,
            self._num_passes(sum(layout) * micro_batch_size),
            algorithm,
            self._number("gradient_bytes"),
            self._number("link_bytes_per_s"),
            step_time_s=step_time_s,
            sync_time_s=sync_time_s,
        )

    def _layout(self) -> tuple[int, ...]:
        """Devices of each node: devices_on_node ("2+4") if it is given, else num_nodes nodes of devices_per_node."""
        listed = self._texts.get("devices_on_node")
        if not listed:
            devices, nodes = self._count("devices_per_node"), self._count("num_nodes")
            if devices * nodes > MOST_WORKERS:
                raise self._mistake("num_nodes", f"{devices} x {nodes} devices are more than {MOST_WORKERS}")
            return (devices,) * nodes
        counts = [count.strip() for count in listed.split("+")]
        if not all(re.fullmatch("0*[1-9][0-9]{0,5}", count) for count in counts):
            raise self._mistake("devices_on_node", f"{listed} should be the devices of each node, such as 2+4")
        layout = tuple(map(int, counts))
        if sum(layout) > MOST_WORKERS:
            raise self._mistake("devices_on_node", f"{listed} are more than {MOST_WORKERS} devices")
        num_nodes, of_each = self._number("num_nodes"), self._number("devices_per_node")
        if num_nodes not in (None, len(layout)):
            said = f"{listed} names {len(layout)} nodes, but num_nodes says {num_nodes:.0f}"
            raise self._mistake("devices_on_node", said)
        if of_each is not None and {of_each} != set(layout):
            raise self._mistake("devices_on_node", f"{listed} contradicts devices_per_node, which says {of_each:.0f}")
        return layout

    def _num_passes(self, samples_of_a_pass: int) -> int:
        """Passes that accumulate gradients: as the column says, or what makes the global batch; 1 where neither is."""
        told, batch = self._number("grad_accum_steps"), self._number("global_batch_size")
        if batch is None:
            return int(told or 1)
        passes = max(1, round(batch / samples_of_a_pass))
        if passes * samples_of_a_pass != batch:
            said = f"{batch:.0f} is no multiple of the {samples_of_a_pass} samples that all devices pass at once"
            raise self._mistake("global_batch_size", said)
        if told not in (None, passes):
            raise self._mistake("grad_accum_steps", f"{told:.0f} contradicts global_batch_size, which makes {passes}")
        return passes

    def _count(self, column: str) -> int:
        count = self._number(column)
        if count is None:
            raise self._mistake(column, "is empty")
        return int(count)

    def _number(self, column: str) -> float | None:
        """The value of a column, None where it is empty."""
        allowed, text = _COLUMNS[column], self._texts.get(column, "")
        if not text or allowed is None:
            return None
        if allowed.has_units and _THOUSANDS.fullmatch(text):
            raise self._mistake(column, f"{text} may have a separator of thousands; write the number without one")
        if self._has_decimal_commas:
            text = text.replace(",", ".")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not value >= allowed.least or (allowed.is_whole and not value.is_integer()):
            raise self._mistake(column, f"{text} is not a {allowed.meaning}")
        if value > allowed.most:
            raise self._mistake(column, f"{text} is more than can be meant, {allowed.most:g} at most")
        return value

    def _mistake(self, column: str, what: str) -> InvalidFileError:
        return InvalidFileError(f"{self._where}, {column}: {_in_a_line(what)}.")
