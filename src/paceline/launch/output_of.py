"""The output of a local program; one sentence for the user if it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from paceline.errors import LaunchError


def output_of(argv: Sequence[str], *, timeout_s: float, where: str, refusal: str, stdin: str = "") -> str:
    """Run a program with `stdin` as its input; returns its standard output.

    Args:
        where: follows "There is no PROGRAM" in the message if it is not installed.
        refusal: precedes the program's own reason in the message if it fails.

    Raises:
        LaunchError: the program is missing, fails, or does not end in time.
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
