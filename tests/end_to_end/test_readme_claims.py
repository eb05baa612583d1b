"""Each row of the README's tables is held by a test, which tests/README.md names; a row without one is noticed."""

from __future__ import annotations

import pytest

from tests.kit.claims import problems
from tests.kit.markdown import README, ROOT

HELD = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("", "", []),
        ("| evaluation |", "| another |", ["promises 'evaluation'", "of 'another'"]),
        ("test_order.py::test_draws", "test_two.py::test_draws", ["test_two.py::test_draws"]),
        ("test_order.py::test_draws", "test_order.py::test_draw", ["test_order.py::test_draw_"]),
    ],
)
def test_every_row_is_held_by_a_test_that_is_there(before: str, after: str, named: list[str]) -> None:
    assert before in HELD
    found = problems(README.read_text(encoding="utf-8"), HELD.replace(before, after), ROOT / "tests")
    assert [words in problem for words, problem in zip(named, found, strict=True)] == [True] * len(named), found
