"""Standard output that takes no more: one sentence, and no traceback."""

from __future__ import annotations

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
