"""Notebooks that are made of pages: what a page runs becomes cells of code, the rest cells of text.

python -m tests.old.docs.notebooks      writes examples/notebooks again
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.old.docs.blocks import NOTEBOOK_PAGES, ROOT, Block, parts_of

FOLDER = ROOT / "examples" / "notebooks"
_MAGIC = {"python": "", "sh": "%%bash -e\n"}


def path_of(page: Path) -> Path:
    return FOLDER / f"{page.stem}.ipynb"


def notebook_of(page: Path) -> str:
    """The notebook of a page, without outputs, as its file has it."""
    cells: list[dict[str, Any]] = [
        {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, source) in enumerate(_cells(page))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook: dict[str, Any] = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cells(page: Path) -> Iterator[tuple[str, str]]:
    """(kind, source) of each cell; texts that follow each other are one."""
    text = ""
    for part in parts_of(page, ROOT):
        if isinstance(part, Block) and part.runs_here:
            if text.strip():
                yield "markdown", text.strip()
            text = ""
            yield "code", _code(part)
        elif isinstance(part, Block):
            text += f"```{part.language}\n{part.text}```"
        else:
            text += _without_comments(part, page)
    if text.strip():
        yield "markdown", text.strip()


def _code(block: Block) -> str:
    """What a reader writes to a file is written by the cell."""
    magic = f"%%writefile {block.said}\n" if block.marker == "file" else _MAGIC[block.language]
    return magic + block.text.rstrip("\n")


def _without_comments(text: str, page: Path) -> str:
    """Text whose links lead from the notebook where they lead from the page."""

    def relinked(found: re.Match[str]) -> str:
        return f"]({os.path.relpath(page.parent / found[1], FOLDER)})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", relinked, re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for page in NOTEBOOK_PAGES:
        path_of(page).write_text(notebook_of(page), encoding="utf-8")


if __name__ == "__main__":
    main()
