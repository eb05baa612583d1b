"""`examples/notebook.ipynb` has the code of its page, and runs in a kernel as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import NOTEBOOK_PAGE, ROOT, Block, blocks_of

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, of the extra dev")
nbformat = pytest.importorskip("nbformat")

PATH = ROOT / "examples" / "notebook.ipynb"


def as_cell(block: Block) -> str:
    """A block of the page as a cell: what a reader writes to a file is written by the cell."""
    magic = f"%%writefile {block.said}\n" if block.marker == "file" else ""
    return magic + block.text.rstrip("\n")


def test_the_notebook_has_the_code_of_the_page_and_no_outputs() -> None:
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells] == [as_cell(one) for one in blocks_of(NOTEBOOK_PAGE, ROOT) if one.is_code]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_in_a_kernel_and_the_record_shows_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # the kernel keeps its history there
    notebook = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    results = [output.data for output in shown if output.output_type == "execute_result"]
    tables = [data["text/html"] for data in results if "text/html" in data]
    assert len(tables) == 1 and "<th>world_size</th><td>2</td>" in tables[0]
    printed = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stdout")
    assert "steps on 2 workers" in printed
    assert "in_a_cell is defined in a notebook" in printed
