"""The size of checkouts side by side: lines, statements, longest files and functions, shapes docstrings leave open.

    python benchmarks/code_size.py CHECKOUT [CHECKOUT …]

A statement is a node of the syntax tree that is one; a line is any line of a file. A function leaves shapes open if it
is public, takes or returns tensors or arrays, and its docstring names neither a shape nor what they are parallel to.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ARRAYS = re.compile(r"\b(Tensor|NDArray|ndarray)\b")
SHAPES = re.compile(r"\[|\bx\b|scalar|shape|flat|vector|dimension|1-D|2-D|value|bucket|parameter|gradient|in place")
LONG_FUNCTION = 60


@dataclass
class Sizes:
    """What is counted in one checkout."""

    lines: Counter[str] = field(default_factory=Counter)
    """By package, as the other counts."""
    statements: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    longest_file: tuple[int, str] = (0, "")
    functions: list[tuple[int, str]] = field(default_factory=list)
    """Lines and place of each function, its docstring included."""
    classes: Counter[str] = field(default_factory=Counter)
    open_shapes: list[str] = field(default_factory=list)
    docstring_lines: int = 0


def sizes_of(checkout: Path) -> Sizes:
    """Counts over all files below src/paceline of a checkout."""
    found = Sizes()
    root = checkout / "src" / "paceline"
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        package = place.parts[0] if len(place.parts) > 1 else "top level"
        text = path.read_text(encoding="utf-8")
        num_lines = len(text.splitlines())
        found.lines[package] += num_lines
        found.files[package] += 1
        found.longest_file = max(found.longest_file, (num_lines, str(place)))
        for node in ast.walk(ast.parse(text)):
            found.statements[package] += isinstance(node, ast.stmt)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                _count(node, str(place), found)
    return found


def _count(node: ast.Module | ast.ClassDef | ast.FunctionDef, place: str, found: Sizes) -> None:
    said = ast.get_docstring(node) or ""
    found.docstring_lines += len(said.splitlines())
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        found.classes[node.name] += 1
    if isinstance(node, ast.FunctionDef):
        found.functions.append(((node.end_lineno or 0) - node.lineno + 1, f"{place}: {node.name}"))
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        kinds = [ast.unparse(one) for one in (*(a.annotation for a in arguments), node.returns) if one is not None]
        if not node.name.startswith("_") and ARRAYS.search(" ".join(kinds)) and said and not SHAPES.search(said):
            found.open_shapes.append(f"{place}: {node.name}")


def table(checkouts: list[Path]) -> str:
    """The sizes of checkouts, a column each, as Markdown."""
    every = [sizes_of(checkout) for checkout in checkouts]
    packages = sorted(set().union(*(one.lines for one in every)))
    rows = [["", *(str(checkout) for checkout in checkouts)], ["---"] * (len(every) + 1)]
    for package in packages:
        rows.append([f"`{package}`", *(f"{one.lines[package]:,} / {one.statements[package]:,}" for one in every)])
    rows.append(["all", *(f"{one.lines.total():,} / {one.statements.total():,}" for one in every)])
    rows.append(["files", *(f"{one.files.total():,}" for one in every)])
    rows.append(["lines of docstrings", *(f"{one.docstring_lines:,}" for one in every)])
    rows.append(["longest file", *(f"{one.longest_file[0]} ({one.longest_file[1]})" for one in every)])
    longest = [max(one.functions) for one in every]
    rows.append(["longest function", *(f"{lines} ({place})" for lines, place in longest)])
    long = [sum(lines > LONG_FUNCTION for lines, _ in one.functions) for one in every]
    rows.append([f"functions over {LONG_FUNCTION} lines", *map(str, long)])
    rows.append(["public class names used twice", *(str(sum(n > 1 for n in one.classes.values())) for one in every)])
    rows.append(["public functions that leave shapes open", *(str(len(one.open_shapes)) for one in every)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table([Path(argument) for argument in sys.argv[1:]] or [Path()]))
