"""The page for those who change Paceline names files that exist, and every file of its largest rooms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("room", ["train", "parallel"])
def test_every_file_of_a_large_room_stands_in_the_row_of_its_own(room: str) -> None:
    table = PAGE.split(f"| in `{room}`, from top to bottom ", 1)[1].split("\n\n", 1)[0]
    named: dict[str, Path] = {}
    for row in table.splitlines()[2:]:
        where, _, in_row = row.strip("|").split("|")
        folder = PACKAGE / room if f"{room}/" in where else PACKAGE / room / where.strip(" `/")
        named |= {name: folder / name for name in re.findall(r"`([a-z_]+\.py)`", in_row)}
    apart = {PACKAGE / room / "pipeline", PACKAGE / room / "tensor"}
    files = [path for path in (PACKAGE / room).rglob("*.py") if path.parent not in apart]
    assert sorted(named.values()) == sorted(path for path in files if path.name != "__init__.py")


def test_files_that_walks_name_exist() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", PAGE))
    missing = {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()}
    assert not missing
