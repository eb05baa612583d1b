"""What a reader copies works: every command and block of the README, with the results that it prints; every night every
other page of docs, and the notebooks that are made of them."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.kit import notebooks
from tests.kit.commands import paceline as run_paceline
from tests.kit.commands import python, succeeded
from tests.kit.markdown import README, ROOT, Block, blocks_of, pages, run_page, write_files

SHOWS_SOMETHING = ("text", "json", "yaml", "{toctree}", "{include}")
"""Languages of blocks that are no code."""
BLOCKS = [block for page in pages() for block in blocks_of(page)]
GUIDES = sorted((ROOT / "docs" / "guides").glob("from-*.md"))
OTHER_PAGES = sorted(
    {block.page for block in BLOCKS if block.runs_here and block.language != "toml"}
    - {README, *notebooks.PAGES, *GUIDES}
)
README_MACHINE = ("AVX512", "GenuineIntel")
"""Where the weights that the README prints were computed: bits belong to a kind of processor."""
TIMEOUT_S = 900.0


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_block_says_its_language_and_why_it_is_not_run() -> None:
    assert [str(b) for b in BLOCKS if not b.is_code and b.language.partition(" ")[0] not in SHOWS_SOMETHING] == []
    assert [str(b) for b in BLOCKS if b.marker == "not run" and len(b.said) < 10] == []


def test_commands_that_another_page_runs_are_there_word_for_word() -> None:
    elsewhere = [block for block in BLOCKS if block.marker == "run in"]
    assert elsewhere
    for block in elsewhere:
        there = set().union(*(other.commands for other in blocks_of(ROOT / block.said) if other.runs_here))
        assert block.commands and block.commands <= there, (str(block), block.commands - there)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml" and b.marker != "not run"], ids=str)
def test_a_job_file_of_a_page_is_a_job(block: Block) -> None:
    paceline.Job.from_mapping(tomllib.loads(block.text))


def test_the_page_on_architecture_names_the_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page))
    assert named
    assert [
        name for name in named if not (ROOT / "src" / "paceline" / name).exists() and not (ROOT / name).exists()
    ] == []
    for room in ("train", "parallel"):
        table = page[page.index(f"| in `{room}`, from top") :].partition("\n\n")[0]
        files = {path.name for path in (ROOT / "src" / "paceline" / room).glob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"`(\w+\.py)`", table)) == files


def test_the_page_on_concepts_shows_what_its_script_draws() -> None:
    drawings = importlib.import_module("docs.drawings")
    drawn = {f"{name}.svg": draw().svg() for name, draw in drawings.DRAWINGS.items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in drawings.FOLDER.iterdir()} == drawn
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert [name for name in drawn if f"](pictures/{name})" not in page] == []


@pytest.mark.timeout(1800)
@pytest.mark.budget(processor_s=180)
def test_the_readme_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    ran = run_page(README, tmp_path, timeout_s=TIMEOUT_S, run_in=True)
    shown = [(known_here(block.shown), known_here(block.printed)) for block in ran if block.shown]
    assert shown
    for expected, printed in shown:
        assert [line for line in printed.splitlines() if line in expected.splitlines()] == expected.splitlines()
    for written in ("cluster.json", "plan.html", "runs/first/record.json", "runs/study/report.html"):
        assert (tmp_path / written).stat().st_size > 0
    (probed,) = paceline.Cluster.load(tmp_path / "cluster.json").timings
    assert all(row.spread > 0 for row in probed.steps)  # several steps of each were timed
    for name, num_steps in (("first", 60), ("mine", 20)):
        assert paceline.RunRecord.load(tmp_path / "runs" / name / "record.json").steps == num_steps


def known_here(text: str) -> str:
    """The text with its fingerprints of weights numbered, where a processor of another kind would print others."""
    cpu = re.findall(r"^vendor_id\s*: (\w+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if (torch.backends.cpu.get_cpu_capability(), *cpu[:1]) == README_MACHINE:
        return text
    found: list[str] = re.findall(r"\b[0-9a-f]{12}\b", text)
    for number, fingerprint in enumerate(dict.fromkeys(found)):
        text = text.replace(fingerprint, f"<weights {number}>")
    return text


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.budget(processor_s=600)
@pytest.mark.parametrize("page", OTHER_PAGES, ids=page_id)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, timeout_s=TIMEOUT_S)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.budget(processor_s=150)
@pytest.mark.parametrize("page", GUIDES, ids=page_id)
def test_both_scripts_of_a_guide_train_and_ours_is_the_same_on_two_workers(page: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    launch = ("launch", "-n", "2", "--threads", "1")
    outputs = [
        succeeded(run_paceline(*launch, "before.py", cwd=tmp_path, timeout_s=TIMEOUT_S, HF_HUB_OFFLINE="1")),
        succeeded(python("after.py", cwd=tmp_path, timeout_s=TIMEOUT_S, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")),
        succeeded(run_paceline(*launch, "after.py", cwd=tmp_path, timeout_s=TIMEOUT_S, HF_HUB_OFFLINE="1")),
    ]
    theirs, alone, together = (
        float(accuracy)
        for output in outputs
        for accuracy in re.findall(r"^accuracy (\d\.\d+)$", output.stdout, re.MULTILINE)
    )
    assert min(theirs, alone) > 0.85
    assert together == pytest.approx(alone, abs=0.01)  # rounding may tip over two of the 203 test samples


def test_the_notebooks_are_those_of_their_pages() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in notebooks.FOLDER.glob("*.ipynb")}
    assert written == {notebooks.path_of(page).name: notebooks.notebook_of(page) for page in notebooks.PAGES}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.budget(processor_s=300)
@pytest.mark.parametrize("page", notebooks.PAGES, ids=page_id)
def test_a_notebook_runs_in_a_kernel(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name, value in {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}.items():  # a kernel keeps its history in HOME
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(notebooks.path_of(page), as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs
    if page.stem == "notebook":  # a function of a cell is refused with a sentence
        printed = "".join(output.get("text", "") for output in outputs)
        assert any("'world_size': 2" in output.get("data", {}).get("text/plain", "") for output in outputs)
        assert "in_a_cell" in printed and "notebook" in printed
