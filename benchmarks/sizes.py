"""Does the project only get smaller? Counts lines by room, and files that a batch, a job, a checkpoint, a failure pass.

    python -m benchmarks.sizes            compares with the limits in pyproject.toml; exit code 1 if one is exceeded
    python -m benchmarks.sizes --lower    writes today's numbers as limits where they are lower; never raises one

A room's limit is what it had at the last landing, so that what was deleted does not grow back, until it is below the
ceiling that the design gives: then that is its limit. Lines are all lines of Python files.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "pyproject.toml"
PACKAGE = "src/paceline"


def room_of(path: Path) -> str:
    """The room of the table that a file counts in, from its path below the root."""
    parts = path.parts
    if parts[:2] == ("src", "paceline"):
        if len(parts) == 3:
            return "top"
        joined = {
            "workflows": "workflows+cli",
            "cli": "workflows+cli",
            "launch": "launch+diagnosis",
            "diagnosis": "launch+diagnosis",
        }
        return joined.get(parts[2], parts[2])
    return parts[0]


def lines_by_room() -> dict[str, int]:
    found = dict.fromkeys(("src/paceline",), 0)
    for folder in (PACKAGE, "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            num_lines, room = len(path.read_text().splitlines()), room_of(path.relative_to(ROOT))
            found[room] = found.get(room, 0) + num_lines
            found["src/paceline"] += num_lines if folder == PACKAGE else 0
    return found


def files_passed() -> dict[str, int]:
    found = subprocess.run(
        [sys.executable, "benchmarks/walks.py"], cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return {name: len(files) for name, files in json.loads(found.stdout).items()}


def shape_of_source() -> str:
    """Files, functions and their mean length, and public class names that stand twice."""
    functions, code, classes, files = 0, 0, [], sorted((ROOT / PACKAGE).rglob("*.py"))
    for path in files:
        text = path.read_text()
        code += sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())
        for node in ast.walk(ast.parse(text)):
            functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.append(node.name)
    twice = sorted({name for name in classes if classes.count(name) > 1})
    return (
        f"{len(files)} files, {functions} functions, one for {code / functions:.1f} lines of code; "
        f"public class names used twice: {', '.join(twice) or 'none'}"
    )


def lower_limits(table: str, lower: dict[str, int]) -> None:
    """Write numbers as the limits of a table of pyproject.toml; its ceilings stay."""
    before, header, rows = SETTINGS.read_text().partition(f"[tool.paceline.{table}]\n")
    for name, number in lower.items():
        rows = re.sub(rf'^("?{re.escape(name)}"? = \[)\d+', rf"\g<1>{number}", rows, count=1, flags=re.MULTILINE)
    SETTINGS.write_text(before + header + rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write what has fallen into pyproject.toml")
    arguments = parser.parse_args()
    limits = tomllib.loads(SETTINGS.read_text())["tool"]["paceline"]
    counted = {"lines": lines_by_room(), "files_passed": files_passed()}
    is_exceeded = False
    for table, numbers in counted.items():
        print(f"{table.replace('_', ' '):16}{'now':>8}{'limit':>8}{'ceiling':>8}")
        for name, (limit, ceiling) in limits[table].items():
            number = max(ceiling, numbers.get(name, 0))
            note = "  exceeds its limit" if number > limit else "  lower: run with --lower" if number < limit else ""
            is_exceeded |= number > limit
            print(f"{name:16}{numbers.get(name, 0):8,}{limit:8,}{ceiling:8,}{note}")
        if arguments.lower:
            rows = {name: max(ceiling, numbers.get(name, 0)) for name, (_, ceiling) in limits[table].items()}
            lower_limits(table, {name: row for name, row in rows.items() if row < limits[table][name][0]})
        if rooms := sorted(numbers.keys() - limits[table].keys()):
            sys.exit(f"pyproject.toml has no limit for {', '.join(rooms)}: add it to [tool.paceline.{table}].")
    print(shape_of_source())
    sys.exit(is_exceeded)


if __name__ == "__main__":
    main()
