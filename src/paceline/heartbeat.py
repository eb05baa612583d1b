"""What a worker lets its launcher see while it works: a few numbers in a small file that both have mapped.

Writing costs well under a microsecond and needs nobody's help, so the launcher can look at a worker that hangs, and
even at one that is stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Source = Literal["paceline", "torch"]
"""Where a collective was noted: in Paceline's own communication, or in torch's own records."""

RENDEZVOUS = "the rendezvous of all workers"
"""The collective of a worker that waits for the others to connect."""

_SOURCES: tuple[Source, ...] = ("paceline", "torch")
_HEADER = struct.Struct("=qdd?")
"""Steps done, -1 before a run; when the worker's interpreter last ran its beating thread; when the first update that
this process made was done, 0 before; whether it saves what it has before it ends."""
_SLOT = struct.Struct("=d240s")
"""Since when the source is inside a collective, or minus the time when it left the last one; that collective."""
_SIZE = _HEADER.size + len(_SOURCES) * _SLOT.size


@dataclass(frozen=True)
class Vitals:
    """One reading; times are relative to it."""

    step: int | None = None
    """Optimizer updates done; None for a program without a `Run`."""
    heartbeat_age_s: float | None = None
    """Since the interpreter last ran another thread than the main one; None before the first time."""
    inside_s: float | None = None
    """How long the worker has been inside a collective; None: it is in none."""
    collective: str = ""
    """The collective it is in, else the last one it was in."""
    trained_s: float | None = None
    """Since this process was done with the first update that it made itself; None before that."""
    is_saving: bool = False
    """Whether it has failed and saves what it has before it ends."""


class Heartbeat:
    """This process's side. Times are of the monotonic clock, which all processes of a node share."""

    def __init__(self, path: Path | None) -> None:
        """Map the file, which is made if there is none; without a path nobody looks."""
        if path is None:
            self._memory = mmap.mmap(-1, _SIZE)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size < _SIZE:
                    os.ftruncate(descriptor, _SIZE)
                    os.pwrite(descriptor, _HEADER.pack(-1, 0.0, 0.0, False), 0)
                self._memory = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
        self._num_steps = -1
        self._has_trained = False

    def step(self, number: int) -> None:
        """So many optimizer updates are done; after a resume the first call gives the number it begins with."""
        struct.pack_into("=q", self._memory, 0, number)
        if not self._has_trained and 0 <= self._num_steps == number - 1:
            self._has_trained = True
            struct.pack_into("=d", self._memory, 16, time.monotonic())
        self._num_steps = number

    def save(self) -> None:
        """After a failure: what this worker has is saved now, and then it ends; leave it the time."""
        struct.pack_into("=?", self._memory, 24, True)

    def beat(self) -> None:
        """The interpreter is alive."""
        struct.pack_into("=d", self._memory, 8, time.monotonic())

    def enter(self, source: Source, collective: str, since: float | None = None) -> None:
        """`source` is inside a collective, since now or since a time of the monotonic clock."""
        text = collective.encode()[:240]
        _SLOT.pack_into(self._memory, _offset(source), since or time.monotonic(), text)

    def leave(self, source: Source) -> None:
        """It is through; what it was in stays readable."""
        struct.pack_into("=d", self._memory, _offset(source), -time.monotonic())


def read_vitals(path: Path) -> Vitals:
    """What the worker behind the file was doing a moment ago; nothing known where there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return Vitals()
    if len(content) < _SIZE:
        return Vitals()
    now = time.monotonic()
    step, beat, trained, is_saving = _HEADER.unpack_from(content)
    slots = [_SLOT.unpack_from(content, _offset(source)) for source in _SOURCES]
    inside = [slot for slot in slots if slot[0] > 0]
    since, text = min(inside) if inside else min(slots, key=lambda slot: slot[0])  # the one left last
    return Vitals(
        step=step if step >= 0 else None,
        heartbeat_age_s=now - beat if beat else None,
        inside_s=now - since if since > 0 else None,
        collective=text.rstrip(b"\0").decode(errors="replace"),
        trained_s=now - trained if trained else None,
        is_saving=is_saving,
    )


def _offset(source: Source) -> int:
    return _HEADER.size + _SOURCES.index(source) * _SLOT.size
