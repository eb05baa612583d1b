"""Each row of the README's tables is held by a test, which tests/README.md names; a row without one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.claims import PROMISES, TESTS, main, problems

README = "".join(
    f"\n## {heading}\n\n| {heading} | |\n|---|---|\n| row of {heading} | x |\n| `a\\|b` | y |\n" for heading in PROMISES
)
ROWS = "".join(f"| row of {heading} | `law/test_one.py::test_it_holds` |\n" for heading in PROMISES)
HELD = f"\n## {TESTS}\n\n| row | test |\n|---|---|\n{ROWS}| `a\\|b` | `law/test_one.py::test_it_holds` |\n\n## Next\n"


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "test_one.py").write_text("def test_it_holds() -> None: ...\n")
    return tmp_path


def test_every_row_of_the_readme_is_held_by_a_test_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out


def test_a_table_without_a_gap_has_no_problems(tests: Path) -> None:
    assert problems(README, HELD, tests) == []


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (f"| row of {PROMISES[1]} | `law", f"| another row of {PROMISES[1]} | `law", f"row of {PROMISES[1]}"),
        (f"| row of {PROMISES[0]} | `law/test_one.py::test_it_holds` |", f"| row of {PROMISES[0]} | |", "no test"),
        ("test_one.py", "test_two.py", "test_two.py::test_it_holds"),
        ("test_it_holds", "test_it_held", "test_one.py::test_it_held"),
    ],
)
def test_a_gap_in_the_table_is_named(tests: Path, before: str, after: str, named: str) -> None:
    assert before in HELD
    assert any(named in problem for problem in problems(README, HELD.replace(before, after), tests))
