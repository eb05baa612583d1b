"""The guides for users of other libraries: both scripts of every page run, and what moving takes is counted."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.old.examples.test_examples import said_by
from tests.old.ranks.command_line import paceline, succeeded

# The type checker knows the modules of this folder by their own names.
lines_changed = importlib.import_module("benchmarks.lines_changed")
PAGES: list[Path] = lines_changed.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_number_of_lines_is_that_of_the_scripts(page: Path) -> None:
    assert f"**{lines_changed.change_in(page)}**" in page.read_text(encoding="utf-8")


def test_lines_are_counted_as_the_command_says(tmp_path: Path) -> None:
    assert {page.stem for page in PAGES} == {"from-ddp", "from-accelerate", "from-lightning", "from-hf-trainer"}
    before, after = "# why\na\nb\n\nc\n", "with d:\n    a\n    c\n    e\n"
    page = tmp_path / "page.md"
    page.write_text(
        f"<!-- file: before.py -->\n```python\n{before}```\n\n<!-- file: after.py -->\n```python\n{after}```\n"
    )
    assert str(lines_changed.change_in(page)) == "2 lines written, 1 removed, 2 kept"


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_both_scripts_train_and_ours_comes_to_the_same_on_any_number_of_workers(page: Path, tmp_path: Path) -> None:
    for name, text in lines_changed.scripts_in(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    line = ("launch", "-n", "2", "--out", "theirs", "before.py")
    theirs = succeeded(paceline(*line, cwd=tmp_path, timeout_s=900, HF_HUB_OFFLINE="1")).stdout
    alone, together = (said_by(str(tmp_path / "after.py"), num_workers) for num_workers in (1, 2))
    assert accuracy(theirs) > 0.85
    assert accuracy(alone) > 0.85
    assert accuracy(together) == pytest.approx(accuracy(alone), abs=0.01)  # two of 203 may tip over by rounding


def accuracy(output: str) -> float:
    found = re.findall(r"^accuracy (\d\.\d+)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return float(found[0])
