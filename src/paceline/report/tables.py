"""The one style of tables in a terminal, plain when piped, in Markdown, and in notebooks."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def table(*headings: str, left: Collection[str] = (), no_wrap: bool = False) -> Table:
    """A table with these columns, to the right but for those in `left`; cells fold where they have no room."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right", overflow="fold", no_wrap=no_wrap)
    return found


def plain_table(rows: Iterable[Sequence[str | Text]], right: Collection[int] = ()) -> Table:
    """A table without headings, to the left but for the columns in `right`."""
    found = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        found.add_row(*row)
    for place in right:
        found.columns[place].justify = "right"
    return found


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left and all others to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))


def html_of(table: RenderableType) -> str:
    """What a terminal of 160 columns would show, as an HTML fragment for notebooks."""
    console = Console(file=io.StringIO(), record=True, width=160, highlight=False, markup=False)
    console.print(table)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:normal">{code}</pre>')
