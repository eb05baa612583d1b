"""The code blocks of a page in Markdown, and what is to be done with each.

    python -m tests.old.docs.blocks      how many blocks users read, how many are run, and why the others are not

A comment before a block says what cannot be seen in it:

    <!-- file: train.py -->           the block is written to this file, where later blocks of the page find it
    <!-- not run: needs two nodes --> the block is not run, and why
    <!-- run in docs/first-steps.md --> another page has the same commands, and they are run there
    <!-- setup                        run before the next block of Python, not shown to the reader
    import torch
    -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = {"python", "sh", "toml"}
"""Languages of blocks that a reader would run."""
NO_CODE = (["text"], ["json"], ["{toctree}"], ["{include}"])
"""Languages of blocks that show something, or direct the documentation site."""

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if not {"experiments", "adr", "generated", "_build"} & set(path.parts)
    ),
]
"""Pages for users. Experiments are left out: their commands measure for minutes, and belong to what was seen on a
day."""

NOTEBOOK_PAGES = [
    ROOT / "docs" / "notebook.md",
    *(
        ROOT / "docs" / "tutorials" / f"{name}.md"
        for name in ("image-folder", "fine-tune", "padded-texts", "reading-a-plan", "scaling-study")
    ),
]
"""Their blocks are the cells of notebooks in examples/notebooks, and run there."""

_BLOCK = re.compile(
    r"(?:<!-- (?P<marker>file|not run|run in|setup)(?::|\n| ) *(?P<said>.*?)-->\n+)?"
    r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
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
        """Whether it is code that runs with the other blocks of its page."""
        return self.is_code and self.marker not in ("not run", "run in")

    @property
    def commands(self) -> set[str]:
        """Its lines without comments, those that a backslash continues in one."""
        lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in self.text.replace("\\\n", " ").splitlines())
        return {" ".join(line.split()) for line in lines if line}

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def parts_of(path: Path, root: Path) -> Iterator[str | Block]:
    """The page in order: blocks, and the text between them."""
    text, end = path.read_text(encoding="utf-8"), 0
    for found in _BLOCK.finditer(text):
        yield text[end : found.start()]
        line = text.count("\n", 0, found.start("language")) + 1
        marker, said = found["marker"] or "", (found["said"] or "").strip()
        yield Block(str(path.relative_to(root)), line, found["language"].strip(), found["text"], marker, said)
        end = found.end()
    yield text[end:]


def blocks_of(path: Path, root: Path) -> Iterator[Block]:
    """The blocks of a page in order."""
    return (part for part in parts_of(path, root) if isinstance(part, Block))


def main() -> None:
    """Print the count."""
    code = [block for page in PAGES for block in blocks_of(page, ROOT) if block.is_code]
    not_run = [block for block in code if block.marker == "not run"]
    elsewhere = sum(block.marker == "run in" for block in code)
    print(f"{len(code)} code blocks on {len(PAGES)} pages, {len(code) - len(not_run)} of them run")
    print(f"({elsewhere} on another page that has the same commands); not run:")
    for block in not_run:
        print(f"  {block.where}: {block.said}")


if __name__ == "__main__":
    main()
