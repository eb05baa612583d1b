"""Tables of the terminal as HTML, for notebooks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = 160


def html_of(table: Callable[[int], RenderableType]) -> str:
    """What a terminal of 160 columns would show of `table(columns)`, as an HTML fragment."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=_COLUMNS, highlight=False)
    console.print(table(_COLUMNS))
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:normal">{code}</pre>')
