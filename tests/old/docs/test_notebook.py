"""The notebooks are those of their pages, and run in a kernel as a user runs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.old.docs.blocks import NOTEBOOK_PAGES
from tests.old.docs.notebooks import FOLDER, notebook_of, path_of

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, of the extra dev")
nbformat = pytest.importorskip("nbformat")

FIRST, *OTHERS = NOTEBOOK_PAGES


def test_the_notebooks_are_those_of_their_pages() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.ipynb")} == {
        path_of(page).name: notebook_of(page) for page in NOTEBOOK_PAGES
    }
    for page in NOTEBOOK_PAGES:
        nbformat.validate(nbformat.read(path_of(page), as_version=4))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_a_tutorial_runs_in_a_kernel(
    page: Path, forked_paceline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed(page, tmp_path, monkeypatch, forked_paceline)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_record_shows_itself_and_a_function_of_a_cell_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = executed(FIRST, tmp_path, monkeypatch, Path(sys.executable).parent)
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    tables = [data["text/html"] for data in results if "text/html" in data]
    assert len(tables) == 1 and "<th>world_size</th><td>2</td>" in tables[0]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "steps on 2 workers" in printed
    assert "in_a_cell is defined in a notebook" in printed


def executed(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, bin_folder: Path) -> list[Any]:
    """The outputs of all cells of a page's notebook, where `paceline` is that of `bin_folder`.

    An error in a cell is an error here.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(folder))  # the kernel keeps its history there
    monkeypatch.setenv("PATH", f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(path_of(page), as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
