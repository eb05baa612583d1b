"""Help comes at once: nothing heavy is loaded before a command needs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from paceline.cli import main

HEAVY = ("torch", "numpy", "plotly", "jinja2", "pandas", "pyarrow", "PIL")
COMMANDS = [
    *("topo", "probe", "plan", "memory", "launch", "train", "scale", "verify", "submit", "bench"),
    *("checkpoint", "export", "watch", "report", "doctor", "new", "jobs", "models", "data"),
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
    names = re.findall(r"^│ (\w+) ", text.partition("Commands")[2], re.MULTILINE)
    assert names == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, answers: dict[tuple[str, ...], Answer]) -> None:
    text, code, loaded = answers[command, "--help"]
    assert (code, loaded) == (0, [])
    assert text.strip().startswith(f"Usage: paceline {command}")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_command_loads_no_other() -> None:
    ask = f"{ASK}\nprint(*(name for name in sys.modules if name.startswith('paceline.cli.')))"
    asked = json.dumps([["train", "--help"], ["train", "digits-lenett"]])
    result = subprocess.run([sys.executable, "-c", ask, asked], capture_output=True, text=True, timeout=30, check=True)
    loaded = {name.rpartition(".")[2] for name in result.stdout.splitlines()[-1].split()}
    assert loaded == {"train", "options", "catalog", "console"}


def test_a_mistake_is_answered_without_torch(answers: dict[tuple[str, ...], Answer]) -> None:
    _, code, loaded = answers[MISTAKE]
    assert (code, loaded) == (2, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--nope"), "No such option: --nope"),
        (("trian",), "Did you mean 'train'?"),
        (("train",), "Missing argument 'JOB'"),
        (("train", "digits-lenet", "--max-restarts", "-1"), "--max-restarts"),
        (("new", "image", "x"), "'image' is not one of 'images'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert told.err.startswith("paceline: ") and said in told.err and told.err.endswith("--help`.\n")
    assert told.err.count("\n") == 1
