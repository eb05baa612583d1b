"""A user's mistake ends with one sentence: what, where, what to do; the exit code is not 0, and nothing is written."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from paceline.files import RUN_LOCK
from tests.golden.terminal import Said, run_calls, run_commands
from tests.kit.commands import TRACEBACK

CATALOGUE: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text())


def _cases(table: str) -> list[object]:
    return [pytest.param(mistake, facts, id=mistake[:70] or "empty") for mistake, facts in CATALOGUE[table].items()]


def _check(said: Said, facts: list[str]) -> None:
    assert said.exit_code != 0, said.out
    assert TRACEBACK not in said.err
    assert said.err.startswith("paceline: ") and said.err.count("\n") == 1, said.err
    assert [fact for fact in facts if fact not in said.err] == [], said.err
    assert [file for file in said.files if not file.endswith(RUN_LOCK)] == []  # locks of folders are never removed


@pytest.fixture(scope="module")
def of_command_lines() -> dict[str, Said]:
    lines = list(CATALOGUE["command_lines"])
    return dict(zip(lines, run_commands([shlex.split(line) for line in lines]), strict=True))


@pytest.fixture(scope="module")
def of_job_files() -> dict[str, Said]:
    texts = list(CATALOGUE["job_files"])
    commands = [["submit", "slurm", "--dry-run", "train", "mine.toml"]] * len(texts)
    return dict(zip(texts, run_commands(commands, [{"mine.toml": text} for text in texts]), strict=True))


@pytest.fixture(scope="module")
def of_calls() -> dict[str, Said]:
    calls = list(CATALOGUE["calls"])
    return dict(zip(calls, run_calls(calls), strict=True))


@pytest.mark.parametrize(("line", "facts"), _cases("command_lines"))
def test_a_wrong_command_line_is_one_sentence(line: str, facts: list[str], of_command_lines: dict[str, Said]) -> None:
    _check(of_command_lines[line], facts)


@pytest.mark.parametrize(("text", "facts"), _cases("job_files"))
def test_a_wrong_job_file_is_one_sentence(text: str, facts: list[str], of_job_files: dict[str, Said]) -> None:
    _check(of_job_files[text], facts)


@pytest.mark.parametrize(("call", "facts"), _cases("calls"))
def test_a_wrong_call_from_python_is_one_sentence(call: str, facts: list[str], of_calls: dict[str, Said]) -> None:
    _check(of_calls[call], facts)
