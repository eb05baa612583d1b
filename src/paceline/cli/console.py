"""Where tables go: a terminal as wide as it is, or a pipe as wide as they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def table_console(pipe_columns: int) -> Console:
    """Standard output; a pipe has no width of its own and gets `pipe_columns`."""
    from rich.console import Console  # not for `paceline --help`

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=pipe_columns)
