"""How many lines a user changes to move a script to Paceline, counted in the pages that show both scripts.

    python -m benchmarks.lines_changed [docs/guides/from-ddp.md …]

A page holds the scripts as the files before.py and after.py. Lines that are equal in both, or only indented further,
blank lines, comments and docstrings of one line do not count. A changed line is one removed and one written.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kit.markdown import files_of  # noqa: E402

PAGES = sorted((ROOT / "docs" / "guides").glob("from-*.md"))


@dataclass(frozen=True)
class Change:
    """What moving one script takes; all numbers are lines."""

    before: int
    after: int
    kept: int

    @property
    def written(self) -> int:
        return self.after - self.kept

    @property
    def removed(self) -> int:
        return self.before - self.kept

    def __str__(self) -> str:
        return f"{self.written} lines written, {self.removed} removed, {self.kept} kept"


def change_in(page: Path) -> Change:
    """The change from a page's before.py to its after.py."""
    files = files_of(page)
    before, after = _code_lines(files["before.py"]), _code_lines(files["after.py"])
    matches = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_matching_blocks()
    return Change(len(before), len(after), sum(match.size for match in matches))


def _code_lines(script: str) -> list[str]:
    lines = [line.strip() for line in script.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", '"""'))]


def main() -> None:
    for page in map(Path, sys.argv[1:] or PAGES):
        print(f"{page.name:24} {change_in(page.resolve())}")


if __name__ == "__main__":
    main()
