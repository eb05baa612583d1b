"""Waiting for a condition; only a program that hangs reaches the limit."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""For what must happen at some time, on a machine that does much else."""


def wait_until(condition: Callable[[], bool], what: str = "", timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(0.01)
