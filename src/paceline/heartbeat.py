"""The heartbeat of a worker: a few numbers in a small file that the worker maps into memory.

Writing costs well under a microsecond and a reader needs no answer, so the state of a worker that is stopped, or has
ended, can be read, too.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline import env

RENDEZVOUS = "the rendezvous of all workers"
"""The name shown for a worker that waits for the others to connect."""

_LAYOUT = struct.Struct("=qddd240s")
"""Steps done, -1 before a run; the times of the last heartbeat and of this process's first update, 0 before; the time
when it entered a collective, or minus the time when it left the last one; the name of that."""
_STEP, _BEAT, _TRAINED, _COLLECTIVE = 0, 8, 16, 24
"""Where each begins; the name is behind its time."""


@dataclass(frozen=True)
class Vitals:
    """One reading; times are relative to it."""

    step: int | None = None
    """Optimizer updates done; None for a program without a `Run`."""
    heartbeat_age_s: float | None = None
    """Seconds since the last heartbeat; None before the first one."""
    inside_s: float | None = None
    """How long the worker has been inside a collective; None: it is in none."""
    collective: str = ""
    """The collective it is in, else the last one it was in."""
    trained_s: float | None = None
    """Seconds since the end of this process's first update; None before that."""


class Heartbeat:
    """The writer's side, for this process. Times are of the monotonic clock, which all processes of a node share."""

    def __init__(self) -> None:
        """Map the file, created if missing."""
        with open(own_file(), "a+b") as file:  # its folder is this user's alone
            if file.tell() < _LAYOUT.size:
                file.write(_LAYOUT.pack(-1, 0, 0, 0, b""))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._num_steps = -1
        self._has_trained = False

    def step(self, number: int) -> None:
        """Record the number of optimizer updates done; after a resume the first call gives the initial number."""
        struct.pack_into("=q", self._memory, _STEP, number)
        if not self._has_trained and 0 <= self._num_steps == number - 1:
            self._has_trained = True
            struct.pack_into("=d", self._memory, _TRAINED, time.monotonic())
        self._num_steps = number

    def beat(self) -> None:
        """Write a heartbeat: the interpreter is alive."""
        struct.pack_into("=d", self._memory, _BEAT, time.monotonic())

    @contextmanager
    def inside(self, collective: str) -> Iterator[None]:
        """A context in which this process is recorded as inside a collective; after an error it stays so."""
        struct.pack_into("=d240s", self._memory, _COLLECTIVE, time.monotonic(), collective.encode()[:240])
        yield
        struct.pack_into("=d", self._memory, _COLLECTIVE, -time.monotonic())


@functools.cache
def own_file() -> Path:
    """The heartbeat of this process: the file that its supervisor made, else a new one until the process ends."""
    if (path := env.value(env.HEARTBEAT, Path)) is not None:
        return path
    folder = tempfile.TemporaryDirectory(prefix="paceline-worker-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name) / "heartbeat"


def read_vitals(path: Path) -> Vitals:
    """Read the state of the worker that writes the file; all unknown if there is no file."""
    try:
        step, beat, trained, since, name = _LAYOUT.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        return Vitals()
    now = time.monotonic()
    return Vitals(
        step=step if step >= 0 else None,
        heartbeat_age_s=now - beat if beat else None,
        inside_s=now - since if since > 0 else None,
        collective=name.rstrip(b"\0").decode(errors="replace"),
        trained_s=now - trained if trained else None,
    )
