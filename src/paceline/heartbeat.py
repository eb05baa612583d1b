"""The heartbeat of a worker: a few numbers in a small file that the worker maps into memory.

Writing costs well under a microsecond and a reader needs no answer, so the state of a worker that is stopped, or has
ended, can be read, too. Times are of the monotonic clock, which all processes of a node share.
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

_LAYOUT = struct.Struct("=qqd240s")
"""Steps done, -1 before a run; whether this process has made one; the time when it entered a collective, or minus the
time when it left the last one; the name of that."""
_COLLECTIVE = 16
"""The offset at which the last two begin."""


@dataclass(frozen=True)
class Vitals:
    """One reading; times are relative to it."""

    step: int | None = None
    """Optimizer updates done; None for a program without a `Run`."""
    inside_s: float | None = None
    """How long the worker has been inside a collective; None: it is in none."""
    collective: str = ""
    """The collective it is in, else the last one it was in."""
    has_trained: bool = False
    """Whether this process has made an update."""


def beat(step: int) -> None:
    """Record the number of optimizer updates done; after a resume the first call gives the initial number."""
    before, has_trained = struct.unpack_from("=qq", _memory())
    struct.pack_into("=qq", _memory(), 0, step, step > 0 and (has_trained or before == step - 1))


@contextmanager
def inside(collective: str) -> Iterator[None]:
    """A context in which this process is recorded as inside a collective; after an error it stays so."""
    struct.pack_into("=d240s", _memory(), _COLLECTIVE, time.monotonic(), collective.encode()[:240])
    yield
    struct.pack_into("=d", _memory(), _COLLECTIVE, -time.monotonic())


@functools.cache
def own_file() -> Path:
    """The heartbeat of this process: the file that its supervisor made, else a new one until the process ends."""
    if (path := env.value(env.HEARTBEAT, Path)) is not None:
        return path
    folder = tempfile.TemporaryDirectory(prefix="paceline-worker-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name) / "heartbeat"


@functools.cache
def _memory() -> mmap.mmap:
    with open(own_file(), "a+b") as file:  # its folder is this user's alone
        if file.tell() < _LAYOUT.size:
            file.write(_LAYOUT.pack(-1, 0, 0, b""))
            file.flush()
        return mmap.mmap(file.fileno(), _LAYOUT.size)


def read_vitals(path: Path) -> Vitals:
    """Read the state of the worker that writes the file; all unknown if there is no file."""
    try:
        step, has_trained, since, name = _LAYOUT.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        return Vitals()
    inside_s = time.monotonic() - since if since > 0 else None
    collective = name.rstrip(b"\0").decode(errors="replace")
    return Vitals(step if step >= 0 else None, inside_s, collective, bool(has_trained))
