"""Reads tables of steps: one step a line, with its time where it was measured."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidFileError, JobError, file_problems, shortened
from paceline.spec import StepRow
from paceline.spec.codec import from_mapping
from paceline.spec.job import MOST_WORKERS

_COUNTS = ("num_nodes", "devices_per_node", "micro_batch_size", "grad_accum_steps", "global_batch_size")
_TIMES = ("step_time_s", "sync_time_s")
_AMOUNTS = (*_TIMES, "gradient_bytes", "link_bytes_per_s")
_COLUMNS = (*_COUNTS, *_AMOUNTS, "devices_on_node", "algorithm")
_NEAR = 0.75
"""How alike a column's name and one of these are where the one was meant: "grad_accum", "step_time_ms"."""


def read_rows(path: Path) -> list[StepRow]:
    """The rows of a file; those without a time are steps that a forecast is asked for.

    Empty lines and those that begin with "#" are skipped, columns of other names are ignored. Raises `InvalidFileError`
    where the file cannot be read, has no measured row, a column is missing or misspelt, or a value is invalid; the
    message names line and column.
    """
    what = f"{path} cannot be read as a table of comma-separated values"
    with file_problems(what, InvalidFileError):
        text = path.read_text("utf-8-sig")
    lines = {number: line for number, line in enumerate(text.splitlines(), 1) if re.match(r"[\s,;]*[^\s,;#]", line)}
    first = next(iter(lines.values()), "")
    told = re.match("sep=([,;\t])", first)  # the line by which Excel knows the delimiter
    delimiter = told[1] if told else max(",;\t", key=first.count)  # a comma where none of them is there
    numbers, texts = list(lines)[bool(told) :], list(lines.values())[bool(told) :]
    try:
        table = list(csv.reader(texts, skipinitialspace=True, delimiter=delimiter, strict=True))
    except csv.Error:
        raise InvalidFileError(f"{path} has a quotation mark that is not closed.") from None
    cells = [[shortened(cell.strip()) for cell in row] for row in table]
    columns, rows = _checked_columns(path, cells[0] if cells else []), []
    for number, row in zip(numbers[1:], cells[1:], strict=False):
        try:
            rows.append(_row(columns, row, has_decimal_commas=delimiter != ","))
        except JobError as problem:
            raise InvalidFileError(f"{path}, line {number}: {problem}") from None
    if all(row.step_time_s is None for row in rows):
        raise InvalidFileError(f"{path} has no row with a step_time_s; measure one device and two devices at least.")
    return rows


def _checked_columns(path: Path, cells: Sequence[str]) -> list[str]:
    """The columns of the first line; raises `InvalidFileError` where one is missing or misspelt."""
    columns = [cell.lower() for cell in cells]
    missing = [name for name in _COLUMNS if name not in columns]
    for column in columns:
        near = [] if column in _COLUMNS else difflib.get_close_matches(column, missing, 1, _NEAR)
        if near:
            raise InvalidFileError(
                f"{path} has a column {column} and none {near[0]}; write {near[0]} if you mean it, else leave it out."
            )
    has_layout = "devices_on_node" in columns or {"num_nodes", "devices_per_node"} <= set(columns)
    if not has_layout or not {"micro_batch_size", "step_time_s"} <= set(columns):
        raise InvalidFileError(
            f"{path} needs the columns num_nodes, devices_per_node (or devices_on_node), micro_batch_size and "
            f"step_time_s; its first line has {', '.join(columns) or 'none'}."
        )
    return columns


def _row(columns: Sequence[str], cells: Sequence[str], *, has_decimal_commas: bool) -> StepRow:
    """The step of a line. Raises `JobError`, which names the column."""
    if any(cells[len(columns) :]):  # a decimal comma divides a number into two cells, of which one would be read
        raise JobError(
            "more cells than the first line has columns; write a decimal point, or separate columns by semicolons."
        )
    texts = {name: cell for name, cell in zip(columns, cells, strict=False) if cell}
    numbers = {name: _number(name, texts[name], has_decimal_commas) for name in (*_COUNTS, *_AMOUNTS) if name in texts}
    needed = ["micro_batch_size", *([] if "devices_on_node" in texts else ["num_nodes", "devices_per_node"])]
    if empty := [name for name in needed if name not in numbers]:
        raise JobError(f"{empty[0]} is empty.")
    layout, micro_batch_size = _layout(texts, numbers), int(numbers["micro_batch_size"])
    samples_of_a_pass = sum(layout) * micro_batch_size
    batch = int(numbers.get("global_batch_size", samples_of_a_pass * numbers.get("grad_accum_steps", 1)))
    num_passes, rest = divmod(batch, samples_of_a_pass)
    if rest:
        raise JobError(
            f"global_batch_size = {batch} is no multiple of the {samples_of_a_pass} samples that all devices pass at "
            "once."
        )
    if numbers.get("sync_time_s", -math.inf) > numbers.get("step_time_s", math.inf):
        raise JobError(f"sync_time_s = {numbers['sync_time_s']:g} s is longer than the step.")
    values: dict[str, Any] = {name: numbers[name] for name in _AMOUNTS if name in numbers}
    values |= {"workers_per_node": layout, "micro_batch_size": micro_batch_size, "num_passes": num_passes}
    return from_mapping(StepRow, values | {"algorithm": texts.get("algorithm", "all_reduce")})


def _layout(texts: Mapping[str, str], numbers: Mapping[str, float]) -> tuple[int, ...]:
    """Devices of each node: devices_on_node ("2+4") if it is given, else num_nodes nodes of devices_per_node."""
    if listed := texts.get("devices_on_node"):
        if not re.fullmatch(r"[1-9][0-9]{0,5}( ?\+ ?[1-9][0-9]{0,5})*", listed):
            raise JobError(f"devices_on_node = {listed} should be the devices of each node, such as 2+4.")
        return tuple(map(int, listed.split("+")))
    devices, nodes = int(numbers["devices_per_node"]), int(numbers["num_nodes"])
    if devices * nodes > MOST_WORKERS:
        raise JobError(f"num_nodes = {nodes} with {devices} devices each are more than {MOST_WORKERS} devices.")
    return (devices,) * nodes


def _number(column: str, text: str, has_decimal_commas: bool) -> float:
    if column not in _TIMES and re.fullmatch(r"\d{1,3}([.,]\d{3})+", text):
        raise JobError(f"{column} = {text} may have a separator of thousands; write the number without one.")
    try:
        value = float(text.replace(",", ".") if has_decimal_commas else text)
    except ValueError:
        value = math.nan
    if column in _COUNTS and not (value >= 1 and value.is_integer()):
        raise JobError(f"{column} = {text} is not a whole number of 1 or more.")
    if math.isnan(value):
        raise JobError(f"{column} = {text} is not a number.")
    return value
