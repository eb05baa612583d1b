"""Standard output that takes no more: one sentence, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arguments", [("models",), ("topo", "--json"), ("--version",)])
def test_a_full_disk_behind_the_output_is_said(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "paceline", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.stderr == "paceline: the output, or a file, cannot be written: No space left on device.\n"
    assert ended.returncode == 2


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "latin-1", "C"],
)
def test_what_the_terminal_cannot_show_is_written_in_words(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", "--folder", str(tmp_path / "file")],
        capture_output=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (2, b"")
    assert rb"\u2192 Name another folder with --out." in ended.stdout
