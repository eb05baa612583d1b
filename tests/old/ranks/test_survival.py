"""Runs that are struck again and again, or cannot write, end with the weights of one that nobody disturbed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_soak(tmp_path: Path) -> None:
    words = ["--minutes", "0.25", "--workers", "2", "--every", "3,6", "--seed", "1", "--out", str(tmp_path)]
    command = [*_with_shared_memory_of_its_own(), sys.executable, "-m", "benchmarks.survival.soak", *words]
    # It counts what stays here and in shared memory; other tests use the common ones.
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        environ = {**os.environ, "TMPDIR": place}
        ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "weights equal: True" in ended.stdout and "left: 0 processes" in ended.stdout


def _with_shared_memory_of_its_own() -> Sequence[str]:
    """What a command begins with to have a /dev/shm for itself; nothing where this user may not mount one."""
    words = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    is_allowed = shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode
    return words if is_allowed else []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_writes_that_fail(tmp_path: Path) -> None:
    """A part of what `python -m benchmarks.survival.write_faults` tries."""
    command = [sys.executable, "-m", "benchmarks.survival.write_faults", "--every", "29", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 of them left what should not be" in ended.stdout
