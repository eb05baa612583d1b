"""Notebooks made of pages: the blocks that a page runs become cells of code, the rest cells of text.

python -m tests.kit.notebooks      writes examples/notebooks again
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.markdown import ROOT, Block, parts_of

FOLDER = ROOT / "examples" / "notebooks"
TUTORIALS = ("image-folder", "fine-tune", "padded-texts", "reading-a-plan", "scaling-study")
PAGES = (ROOT / "docs" / "notebook.md", *(ROOT / "docs" / "tutorials" / f"{name}.md" for name in TUTORIALS))
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
    notebook: dict[str, Any] = {
        "cells": cells,
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    notebook["metadata"]["language_info"] = {"name": "python"}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cells(page: Path) -> Iterator[tuple[str, str]]:
    """(kind, source) of each cell; texts that follow each other are one."""
    text = ""
    for part in parts_of(page):
        if isinstance(part, Block) and part.runs_here:
            if text.strip():
                yield "markdown", text.strip()
            text = ""
            magic = f"%%writefile {part.said}\n" if part.marker == "file" else _MAGIC[part.language]
            yield "code", magic + part.text.rstrip("\n")
        elif isinstance(part, Block):
            text += f"```{part.language}\n{part.text}```"
        else:
            text += _without_comments(part, page)
    if text.strip():
        yield "markdown", text.strip()


def _without_comments(text: str, page: Path) -> str:
    """Text whose links lead from the notebook where they lead from the page."""

    def relinked(found: re.Match[str]) -> str:
        return f"]({os.path.relpath(page.parent / found[1], FOLDER)})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", relinked, re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in PAGES:
        path_of(each).write_text(notebook_of(each), encoding="utf-8")
