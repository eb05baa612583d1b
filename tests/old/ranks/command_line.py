"""What the tests of the command line share: `paceline` as a user runs it, in a process of its own.

`paceline(...)` is forked from a process that has loaded torch; `python("-m", "paceline", ...)` starts it for real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.old.ranks.forked_commands import run_forked

TRACEBACK = "Traceback (most recent call last)"


def clean_environ(**extra: str) -> dict[str, str]:
    """This process's environment without whatever might say that it is a worker, or has GPUs."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_", "PMI", "MASTER_", "PACELINE_RE", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PACELINE_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo", **extra}


def python(*arguments: str, cwd: Path, timeout_s: float = 300.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the folder `cwd`, to its end; `extra` are environment variables."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=clean_environ(**extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def paceline(*arguments: str, cwd: Path, timeout_s: float = 300.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS` in the folder `cwd`, to its end; `extra` are environment variables."""
    environ = clean_environ(**extra)
    return run_forked(["paceline", *arguments], cwd=cwd, environ=environ, timeout_s=timeout_s)


def succeeded(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result
