"""Help comes at once: nothing heavy is loaded before a command needs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "plotly", "jinja2", "pandas", "pyarrow", "PIL")
COMMANDS = [
    *("topo", "probe", "plan", "launch", "train", "scale", "verify", "submit", "bench"),
    *("checkpoint", "export", "report", "doctor", "jobs", "models", "data"),
]

MISTAKE = ("train", "digits-lenett")

ASK = f"""
import contextlib, io, json, sys
from paceline.cli import main

def ask(arguments):
    sys.argv = ["paceline", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return text.getvalue(), code, [name for name in {HEAVY!r} if name in sys.modules]

print(json.dumps([ask(arguments) for arguments in json.loads(sys.argv[1])]))
"""


Answer = tuple[str, int, list[str]]
"""What `paceline` printed on standard output, its exit code, and the heavy modules that are loaded by then."""


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], Answer]:
    """One process is asked everything, one after the other: what it has not loaded in the end, nothing loads."""
    asked = [("--help",), *((command, "--help") for command in COMMANDS), MISTAKE]
    result = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(asked)], capture_output=True, text=True, timeout=30, check=True
    )
    return {arguments: tuple(answer) for arguments, answer in zip(asked, json.loads(result.stdout), strict=True)}


def test_help_lists_the_commands_in_the_order_of_the_pipeline(answers: dict[tuple[str, ...], Answer]) -> None:
    text, code, loaded = answers["--help",]
    assert (code, loaded) == (0, [])
    names = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.strip()]
    assert names == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, answers: dict[tuple[str, ...], Answer]) -> None:
    text, code, loaded = answers[command, "--help"]
    assert (code, loaded) == (0, [])
    assert text.startswith(f"Usage: paceline {command}")


def test_a_mistake_is_answered_without_torch(answers: dict[tuple[str, ...], Answer]) -> None:
    _, code, loaded = answers[MISTAKE]
    assert (code, loaded) == (2, [])
