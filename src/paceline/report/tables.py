"""Tables: `Grid`, which pages and terminals show alike, and plain ones, without colours when piped."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.formats import NOTHING

Row = TypeVar("Row")

MARK = "*"
"""Stands before the recommended row in a terminal, and after the links of a ring: a pipe has no colours."""


@dataclass(frozen=True)
class Grid:
    """Rows of texts under headings. In a terminal, columns that have no room are left out.

    `recommended` and `impossible` are indices of rows, which are marked and grey; `colors` are those of the rows in
    charts; `left`, `whole`: as of `table`; `least_important` are headings, the first to leave out first.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    recommended: int | None = None
    impossible: Collection[int] = ()
    colors: Sequence[str] = ()
    left: Collection[str] = ()
    whole: Collection[str] = ()
    least_important: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = list(range(len(self.headings)))
        widths = [max(map(len, cells)) + 2 for cells in zip(self.headings, *self.rows, strict=True)]
        for name in self.least_important:
            if sum(widths[place] for place in shown) + 2 <= options.max_width:
                break
            shown = [place for place in shown if self.headings[place] != name]
        marks = [] if self.recommended is None else [""]
        found = table(*marks, *(self.headings[place] for place in shown), left=("", *self.left), whole=self.whole)
        for number, row in enumerate(self.rows):
            is_chosen = number == self.recommended
            style = "bold green" if is_chosen else "dim" if number in self.impossible else None
            mark = [MARK if is_chosen else "" for _ in marks]
            found.add_row(*mark, *(Text(row[place]) for place in shown), style=style)
        yield found


def grid_of(columns: Iterable[tuple[str, Callable[[Row], str]]], rows: Sequence[Row], **marks: Any) -> Grid:
    """A grid of these headings and cells, without columns that are empty; `marks`: see `Grid`."""
    cells = [(heading, [cell(row) for row in rows]) for heading, cell in columns]
    known = [(heading, column) for heading, column in cells if set(column) - {NOTHING, ""}]
    lines = list(zip(*(column for _, column in known), strict=True))
    return Grid([heading for heading, _ in known], lines, **marks)


def table(*headings: str, left: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """A table, columns to the right but for those in `left`; cells without room fold, but those in `whole`."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for one in headings:
        found.add_column(one, justify="left" if one in left else "right", overflow="fold", no_wrap=one in whole)
    return found


def html_of(shown: RenderableType) -> str:
    """What a terminal of 160 columns would show, as an HTML fragment for notebooks."""
    console = Console(file=io.StringIO(), record=True, width=160, highlight=False, markup=False)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:normal">{code}</pre>')
