"""What a local program answers; one sentence where it does not."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from paceline.errors import LaunchError


def output_of(argv: Sequence[str], *, timeout_s: float, where: str, refusal: str, stdin: str = "") -> str:
    """Standard output of a program that gets `stdin`.

    Args:
        where: goes on after "There is no PROGRAM", where it is not installed.
        refusal: goes before the program's own reason, where it fails.

    Raises:
        LaunchError: it is missing, fails, or has not ended in time.
    """
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        raise LaunchError(f"There is no {argv[0]} {where}.") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{argv[0]} has not answered within {timeout_s:.0f} s; is it overloaded?") from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LaunchError(f"{refusal}: {reason}")
    return done.stdout
