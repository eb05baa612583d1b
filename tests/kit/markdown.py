"""The code blocks of a page in Markdown, and what is to be done with each.

    python -m tests.kit.markdown      how many blocks users read, how many are run, and why the others are not

A comment before a block says what cannot be seen in it:

    <!-- file: train.py -->           the block is written to this file, where later blocks of the page find it
    <!-- not run: needs two nodes --> the block is not run, and why
    <!-- run in docs/first-steps.md --> another page has the same commands, and they are run there
    <!-- setup                        run before the next block of Python, not shown to the reader
    import torch
    -->
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.commands import user_environ

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CODE = ("python", "sh", "toml")
"""Languages of blocks that a reader would run or copy."""
_WITHOUT_COMMANDS = {"adr", "generated", "_build"}
"""Folders of docs whose commands measure for minutes, or that are made of other pages."""
_BLOCK = re.compile(
    r"(?:<!-- (?P<marker>file|not run|run in|setup)(?::|\n| ) *(?P<said>.*?)-->\n+)?"
    r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    marker: str
    """ "file", "not run", "run in", "setup", or nothing."""
    said: str
    """What the marker says."""

    @property
    def is_code(self) -> bool:
        return self.language in CODE

    @property
    def runs_here(self) -> bool:
        """Whether it is code that is run with the other blocks of its page."""
        return self.is_code and self.marker not in ("not run", "run in")

    @property
    def commands(self) -> set[str]:
        """Its lines without comments; lines that a backslash continues are one."""
        lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in self.text.replace("\\\n", " ").splitlines())
        return {" ".join(line.split()) for line in lines if line}

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Ran:
    """A shell block that was run."""

    block: Block
    printed: str
    """Its standard output."""
    shown: str
    """The block of text that follows it on the page, which shows what it prints; empty if there is none."""


def pages() -> list[Path]:
    """The README and every page of docs for users."""
    docs = (path for path in (ROOT / "docs").rglob("*.md") if not _WITHOUT_COMMANDS & set(path.parts))
    return [README, *sorted(docs)]


def parts_of(page: Path) -> Iterator[str | Block]:
    """The page in order: its blocks, and the text between them."""
    text, end = page.read_text(encoding="utf-8"), 0
    for found in _BLOCK.finditer(text):
        yield text[end : found.start()]
        line = text.count("\n", 0, found.start("language")) + 1
        marker, said = found["marker"] or "", (found["said"] or "").strip()
        yield Block(page, line, found["language"].strip(), found["text"], marker, said)
        end = found.end()
    yield text[end:]


def blocks_of(page: Path) -> list[Block]:
    return [part for part in parts_of(page) if isinstance(part, Block)]


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {block.said: block.text for block in blocks_of(page) if block.marker == "file"}


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows into `folder`, as its reader does."""
    for name, text in files_of(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def reader_environ(folder: Path) -> dict[str, str]:
    """The variables of a reader who has installed Paceline and stands in `folder`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return user_environ(PATH=path, PYTHONPATH=str(folder), HF_HUB_OFFLINE="1")


def run_page(page: Path, folder: Path, *, timeout_s: float, run_in: bool = False) -> list[Ran]:
    """Do in `folder` what the page says: write its files, run each shell block, then its Python blocks as one program.

    Args:
        run_in: run the blocks marked "run in" here too.

    Raises:
        AssertionError: a block failed; the text names the page's line and holds what was printed.
        subprocess.TimeoutExpired: one block took longer than `timeout_s`.
    """
    write_files(page, folder)
    blocks, ran = blocks_of(page), []
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "sh" and (block.runs_here or (run_in and block.marker == "run in")):
            printed = _run(["bash", "-euo", "pipefail", "-c", block.text], folder, block, timeout_s)
            ran.append(Ran(block, printed, after.text if after is not None and after.language == "text" else ""))
    program = [b for b in blocks if b.runs_here and b.language == "python" and b.marker != "file"]
    if program:
        script = folder / f"{page.stem}.py"
        script.write_text(_source(program), encoding="utf-8")
        _run([sys.executable, str(script)], folder, program[0], timeout_s)
    return ran


def _source(program: list[Block]) -> str:
    """All blocks in one file, each at its line of the page, so that a traceback names that line."""
    source = ""
    for block in program:
        setup = f"{block.said}\n" if block.marker == "setup" else ""
        source += "\n" * max(0, block.line - source.count("\n") - setup.count("\n")) + setup + block.text
    return source


def _run(command: list[str], folder: Path, block: Block, timeout_s: float) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=reader_environ(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{block}: exit code {done.returncode}\n{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def main() -> None:
    """Print the count."""
    code = [block for page in pages() for block in blocks_of(page) if block.is_code]
    not_run = [block for block in code if block.marker == "not run"]
    elsewhere = sum(block.marker == "run in" for block in code)
    print(f"{len(code)} code blocks on {len(pages())} pages, {len(code) - len(not_run)} of them run")
    print(f"({elsewhere} on another page that has the same commands); not run:")
    for block in not_run:
        print(f"  {block}: {block.said}")


if __name__ == "__main__":
    main()
