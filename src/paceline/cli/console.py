"""Tables on standard output: as wide as the terminal, or in a pipe as wide as needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def table_console(pipe_columns: int) -> Console:
    """Standard output; a pipe has no width of its own and gets `pipe_columns`."""
    from rich.console import Console  # not for `paceline --help`

    # Names of layers, metrics and devices may have brackets, which would be markup.
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=pipe_columns)


def print_table(rows: Sequence[Mapping[str, str]], *, left: Collection[str] = (), pipe_columns: int = 120) -> None:
    """Print cells by their headings, without lines.

    Columns are aligned to the right, but for those whose headings are in `left`.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*(row.get(heading, "") for heading in headings))
    table_console(pipe_columns).print(table)
