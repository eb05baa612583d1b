"""The heartbeat of a worker: a few numbers in a small file that the worker maps into memory.

Writing costs well under a microsecond and a reader needs no answer, so the state of a worker that is stopped, or has
ended, can be read, too.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline import env

Source = Literal["paceline"]
"""The source of a collective: Paceline's own communication."""

RENDEZVOUS = "the rendezvous of all workers"
"""The name shown for a worker that waits for the others to connect."""

_SOURCES: tuple[Source, ...] = ("paceline",)
_HEADER = struct.Struct("=qdd")
"""Steps done, -1 before a run; the time of the last heartbeat; the time of this process's first update, 0 before."""
_SLOT = struct.Struct("=d240s")
"""The time when the source entered a collective, or minus the time when it left the last one; its name."""
_SIZE = _HEADER.size + len(_SOURCES) * _SLOT.size


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
    """The writer's side. Times are of the monotonic clock, which all processes of a node share."""

    def __init__(self, path: Path | None) -> None:
        """Map the file, created if missing; None: the one of this process."""
        descriptor = os.open(path or own_file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.ftruncate(descriptor, _SIZE)
                os.pwrite(descriptor, _HEADER.pack(-1, 0.0, 0.0), 0)
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._num_steps = -1
        self._has_trained = False

    def step(self, number: int) -> None:
        """Record the number of optimizer updates done; after a resume the first call gives the initial number."""
        struct.pack_into("=q", self._memory, 0, number)
        if not self._has_trained and 0 <= self._num_steps == number - 1:
            self._has_trained = True
            struct.pack_into("=d", self._memory, 16, time.monotonic())
        self._num_steps = number

    def beat(self) -> None:
        """Write a heartbeat: the interpreter is alive."""
        struct.pack_into("=d", self._memory, 8, time.monotonic())

    def enter(self, source: Source, collective: str, since: float | None = None) -> None:
        """Record that `source` is inside a collective, since now or since a time of the monotonic clock."""
        text = collective.encode()[:240]
        _SLOT.pack_into(self._memory, _offset(source), since or time.monotonic(), text)

    @contextmanager
    def inside(self, source: Source, collective: str) -> Iterator[None]:
        """A context in which `source` is recorded as inside a collective; after an error it stays so."""
        self.enter(source, collective)
        yield
        self.leave(source)

    def leave(self, source: Source) -> None:
        """Record that `source` has left its collective, whose name stays readable."""
        struct.pack_into("=d", self._memory, _offset(source), -time.monotonic())


@functools.cache
def own_file() -> Path:
    """The heartbeat of this process: the file that its supervisor made, else a new one until the process ends."""
    if (path := env.path(env.HEARTBEAT)) is not None:
        return path
    folder = tempfile.TemporaryDirectory(prefix="paceline-worker-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name) / "heartbeat"


def read_vitals(path: Path) -> Vitals:
    """Read the state of the worker that writes the file; all unknown if there is no file."""
    try:
        content = path.read_bytes()
    except OSError:
        return Vitals()
    if len(content) < _SIZE:
        return Vitals()
    now = time.monotonic()
    step, beat, trained = _HEADER.unpack_from(content)
    slots = [_SLOT.unpack_from(content, _offset(source)) for source in _SOURCES]
    inside = [slot for slot in slots if slot[0] > 0]
    since, text = min(inside) if inside else min(slots, key=lambda slot: slot[0])  # the one left last
    return Vitals(
        step=step if step >= 0 else None,
        heartbeat_age_s=now - beat if beat else None,
        inside_s=now - since if since > 0 else None,
        collective=text.rstrip(b"\0").decode(errors="replace"),
        trained_s=now - trained if trained else None,
    )


def _offset(source: Source) -> int:
    return _HEADER.size + _SOURCES.index(source) * _SLOT.size
