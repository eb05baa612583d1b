"""Every code block that a user reads runs as it stands, or says why it is not run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.spec import Job
from tests.old.docs.blocks import NO_CODE, NOTEBOOK_PAGES, PAGES, ROOT, Block, blocks_of
from tests.old.ranks.forked_commands import run_forked

BLOCKS = {page: list(blocks_of(page, ROOT)) for page in PAGES}
TIMEOUT_S = 900.0
TWO_SCREENS = 4500
"""Characters of prose: 900 pixels of the site are some 30 lines of at most 90 characters and headings."""
TO_RUN = [
    page
    for page, blocks in BLOCKS.items()
    if page not in NOTEBOOK_PAGES and any(block.runs_here and block.language != "toml" for block in blocks)
]


def test_every_block_says_its_language_and_why_it_is_not_run() -> None:
    blocks = [block for of_page in BLOCKS.values() for block in of_page]
    unknown = [block.where for block in blocks if not block.is_code and block.language.split()[:1] not in NO_CODE]
    assert unknown == []
    unexplained = [block.where for block in blocks if block.marker == "not run" and len(block.said) < 10]
    assert unexplained == []


def test_commands_that_another_page_runs_are_there_word_for_word() -> None:
    elsewhere = [block for of_page in BLOCKS.values() for block in of_page if block.marker == "run in"]
    assert elsewhere
    for block in elsewhere:
        there = {command for other in BLOCKS[ROOT / block.said] if other.runs_here for command in other.commands}
        assert block.commands and block.commands <= there, (block.where, block.commands - there)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_two_screens_never_pass_without_a_picture_a_table_or_a_listing(page: Path) -> None:
    length, is_listing = 0, False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_listing ^= line.startswith("```")
        length = 0 if is_listing or line.startswith(("```", "|", "![", "    ")) else length + len(line)
        assert length < TWO_SCREENS, f"line {number} ends more than {TWO_SCREENS} characters of prose"


def test_most_blocks_run() -> None:
    code = [block for of_page in BLOCKS.values() for block in of_page if block.is_code]
    run = [block for block in code if block.marker != "not run"]
    assert len(run) > 0.8 * len(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_job_files_are_jobs(page: Path) -> None:
    for block in BLOCKS[page]:
        if block.language == "toml" and block.marker != "not run":
            Job.from_mapping(tomllib.loads(block.text))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, forked_paceline: Path, tmp_path: Path) -> None:
    """Files are written as they come; Python blocks of a page are one program; shell blocks run in their place.

    What a page starts is forked, except for the README's.
    """
    is_forked = page != ROOT / "README.md"
    installed = Path(sys.executable).parent
    path = f"{forked_paceline}:{installed}" if is_forked else str(installed)
    environ = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)}
    program: list[Block] = []
    for block in BLOCKS[page]:
        if not block.runs_here:
            continue
        if block.marker == "file":
            target = tmp_path / block.said
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            _check(_started(["bash", "-euo", "pipefail", "-c", block.text], tmp_path, environ), block)
        elif block.language == "python":
            program.append(block)
    if program:
        # Blank lines before each block, so that a traceback names the line of the page.
        source = ""
        for block in program:
            setup = f"{block.said}\n" if block.marker == "setup" else ""
            source += "\n" * max(0, block.line - source.count("\n") - setup.count("\n")) + setup + block.text
        script = tmp_path / f"{page.stem}.py"
        script.write_text(source, encoding="utf-8")
        if is_forked:
            done = run_forked(["python", str(script)], cwd=tmp_path, environ=environ, timeout_s=TIMEOUT_S)
        else:
            done = _started([sys.executable, str(script)], tmp_path, environ)
        _check(done, program[0])


def _started(command: list[str], folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def _check(done: subprocess.CompletedProcess[str], block: Block) -> None:
    assert done.returncode == 0, f"{block.where}\n{block.text}\n{done.stdout}\n{done.stderr}"
