"""Square tables of labels, as tools print them: a row and a column for each device, the same in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.errors import ClusterError


def square_cells(
    table: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], diagonal: str, allowed: str
) -> dict[tuple[str, str], str]:
    """The cells of a table by the names of row and column.

    Args:
        table: what errors call it: "the topology matrix".
        rows: each with its name; in whatever order.
        diagonal: what stands where a row meets the column of its own name, and nowhere else.
        allowed: a regular expression for all other cells.

    Raises:
        ClusterError: rows and columns that do not agree; names row and column.
    """
    title = table[0].upper() + table[1:]
    cells: dict[tuple[str, str], str] = {}
    for row, words in rows:
        if row not in columns:
            raise ClusterError(f"{title} has a row {row} but no column of that name.")
        if (row, row) in cells:
            raise ClusterError(f"{title} has two rows {row}; every name stands once.")
        if len(words) != len(columns):
            missing = f": column {columns[len(words)]} has none" if len(words) < len(columns) else ""
            raise ClusterError(f"Row {row} of {table} has {len(words)} cells for {len(columns)} columns{missing}.")
        for column, word in zip(columns, words, strict=True):
            if not (word == diagonal if row == column else re.fullmatch(allowed, word, re.ASCII)):
                raise ClusterError(
                    f"Row {row}, column {column} of {table} says {word[:40]!r}, which is not the label of a link, or "
                    f"{diagonal} in the wrong place."
                )
            cells[row, column] = word
    for column in columns:
        if (column, column) not in cells:
            raise ClusterError(f"{title} has a column {column} but no row of that name.")
    for (row, column), cell in cells.items():
        if cells[column, row] != cell:
            raise ClusterError(
                f"Row {row}, column {column} of {table} says {cell}, but row {column}, column {row} says "
                f"{cells[column, row]}; a link is the same in both directions."
            )
    return cells
