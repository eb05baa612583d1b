"""Help comes at once: nothing heavy is loaded before a command needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "plotly", "jinja2", "pandas", "pyarrow", "PIL")
COMMANDS = [
    *("topo", "probe", "plan", "launch", "train", "scale", "verify", "submit", "bench"),
    *("checkpoint", "export", "report", "doctor"),
]

ASK = f"""
import sys
sys.argv = ["paceline", *sys.argv[1:]]
from paceline.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
print(f"exit {{code or 0}} loaded {{loaded}}", file=sys.stderr)
"""


def ask(*arguments: str) -> tuple[str, str]:
    """Standard output of `paceline` and, in a line, its exit code and the heavy modules it loaded."""
    result = subprocess.run(
        [sys.executable, "-c", ASK, *arguments], capture_output=True, text=True, timeout=30, check=True
    )
    return result.stdout, result.stderr.splitlines()[-1]


def test_help_lists_the_commands_in_the_order_of_the_pipeline() -> None:
    text, ending = ask("--help")
    assert ending == "exit 0 loaded []"
    names = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.strip()]
    assert names == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    text, ending = ask(command, "--help")
    assert ending == "exit 0 loaded []"
    assert text.startswith(f"Usage: paceline {command}")


def test_a_mistake_is_answered_without_torch() -> None:
    assert ask("train", "digits-lenett")[1] == "exit 2 loaded []"
