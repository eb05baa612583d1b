"""The last traceback on a program's standard error: what is known of its exception from outside."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from paceline.diagnosis.failures import Failure

_HEADER = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_MOST_LINES = 2_000
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Torch writes it before each line once there is a process group."""


class LastTraceback:
    """Reads the lines of standard error; an exception that is chained to one before is one with it."""

    def __init__(self) -> None:
        self.began_at: float | None = None
        """When its first line came, in seconds since the epoch; None: there was none."""
        self._lines: list[str] = []
        self._last = ""

    def read(self, lines: Sequence[bytes]) -> None:
        for raw in lines:
            line = _PREFIX.sub("", raw.decode("utf-8", "replace").rstrip("\r\n"))
            if line == _HEADER and not self._last.startswith(_CHAINED):
                self._lines, self.began_at = [], time.time()
            if self.began_at is not None and len(self._lines) < _MOST_LINES:
                self._lines.append(line)
            self._last = line or self._last

    def failure(self, rank: int, pid: int) -> Failure:
        """The exception as a note of the worker of this rank; call it where there is one."""
        assert self.began_at is not None
        start = max(number for number, line in enumerate(self._lines) if line == _HEADER) + 1
        told = [line for line in self._lines[start:] if line and not line.startswith(" ")]
        kind, _, message = " ".join(told).partition(": ")
        files = re.findall(r'^  File "([^"]+)", line', "\n".join(self._lines[start:]), re.MULTILINE)
        return Failure(
            rank=rank,
            pid=pid,
            time=self.began_at,
            type=kind.rpartition(".")[2],
            message=message.replace("\0", "\\x00"),
            traceback="\n".join(self._lines).replace("\0", "\\x00") + "\n",
            is_consequence=(kind == "RuntimeError" or kind.startswith("torch.distributed."))
            and "/torch/distributed/" in "".join(files[-1:]),
        )
