"""Which test holds each row of the README's tables: tests/README.md says it, and this says whether it is true.

python -m tests.kit.claims      fails with a sentence for every row without a test, and every test that is not there
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISES = ("What it does that others do not", "Commands")
"""Sections of the README whose first table is held row by row."""
TESTS = "Which test holds a row of the README"
"""The section of tests/README.md with the table README row -> test."""


def problems(readme: str, tests_readme: str, tests: Path) -> list[str]:
    """A sentence for each row, or test, that is missing; `tests` is the folder that the named tests lie in."""
    promised = [row[0] for heading in PROMISES for row in table_in(readme, heading)]
    held = {row[0]: re.findall(r"`([^`]+)`", row[-1]) for row in table_in(tests_readme, TESTS)}
    found = [f"README.md promises {row!r}, and tests/README.md names no test" for row in promised if not held.get(row)]
    found += [f"tests/README.md names a test of {row!r}, which README.md has no more" for row in {*held} - {*promised}]
    for row, names in held.items():
        found += [
            f"tests/README.md names {name}, which is not there, for {row!r}"
            for name in names
            if not is_test(name, tests)
        ]
    return found


def table_in(markdown: str, heading: str) -> list[list[str]]:
    """The cells of each row of the first table below a heading, without its head."""
    lines = markdown.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [re.split(r"(?<!\\)\|", line.strip("| ")) for line in lines if line.startswith("|")]
    assert len(rows) > 2, f"no table below {heading!r}"
    return [[cell.strip() for cell in row] for row in rows[2:]]


def is_test(name: str, tests: Path) -> bool:
    """Whether `folder/test_file.py::test_function` is there."""
    file, _, function = name.partition("::")
    if not (tests / file).is_file():
        return False
    tree = ast.parse((tests / file).read_text(encoding="utf-8"))
    return function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def main() -> int:
    found = problems(
        (ROOT / "README.md").read_text(encoding="utf-8"),
        (ROOT / "tests" / "README.md").read_text(encoding="utf-8"),
        ROOT / "tests",
    )
    print("\n".join(found) or "Every row of the README's tables is held by a test that is there.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
