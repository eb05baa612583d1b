"""Commands say what is recorded: help, tables, JSON, the text of pages and files."""

from __future__ import annotations

import pytest

from tests.golden.outputs import NAMES, OUTPUTS, are_same, outputs


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return outputs()


@pytest.mark.parametrize("name", NAMES)
def test_a_command_says_what_is_recorded(name: str, said: dict[str, str]) -> None:
    recorded = (OUTPUTS / f"{name}.txt").read_text()
    if not are_same(name, said[name], recorded):
        assert said[name] == recorded, "python -m tests.golden --record, if that is what it should say"


def test_every_recorded_output_belongs_to_a_command() -> None:
    assert {path.stem for path in OUTPUTS.glob("*.txt")} == set(NAMES)
