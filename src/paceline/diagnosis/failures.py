"""The notes of a run's workers: the exception that ended one, and how each process ended; which one caused the others.

They are JSON files in the folder `workers` of the run folder, so that the launcher reads them of all nodes.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import shortened
from paceline.regular_files import make_run_folder, replace_text
from paceline.words import name_ranks, on_one_line

LONGEST_MESSAGE = 400
"""The maximum number of characters quoted from an exception's message; the traceback has the rest."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended a worker, as the worker itself saw it."""

    rank: int
    pid: int
    time: float
    """Seconds since the epoch when the exception left the user's program."""
    type: str
    message: str
    traceback: str
    """Empty for a user's mistake, whose message is enough."""
    is_user_error: bool = False
    is_consequence: bool = False
    """Whether the worker failed only because a peer had gone: it was waiting for one in a collective."""


@dataclass(frozen=True)
class Ending:
    """How one worker process ended."""

    rank: int
    world_size: int
    pid: int
    hostname: str
    exit_code: int
    """The exit code as in subprocess, negative for a signal."""
    time: float
    """Seconds since the epoch: when its exception was raised, else when the process ended."""
    asked_at: float | None = None
    """When it was asked to end, in seconds since the epoch; None: it was not."""
    out_of_memory: bool = False
    """Whether the kernel counted a process that it killed because memory ran out."""
    step: int | None = None
    """Optimizer updates done; None for a program without a `Run`."""
    collective: str = ""
    """The last collective it entered."""
    failure: Failure | None = None

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def was_asked(self) -> bool:
        """Whether it had been asked to end before it failed."""
        return self.asked_at is not None and self.time >= self.asked_at

    @property
    def is_consequence(self) -> bool:
        """Whether the worker failed only because a peer had gone or fallen silent."""
        return self.failure is not None and self.failure.is_consequence


@dataclass(frozen=True)
class Beginning:
    """A worker that has been started."""

    rank: int
    pid: int
    hostname: str


def write_note(run_dir: Path, note: Failure | Ending | Beginning, restart: int = 0) -> None:
    """Write a note atomically, readable only by the user; `restart` is how often the worker has been started before.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder = run_dir / "workers"
    make_run_folder(folder)
    name = f"{type(note).__name__.lower()}-{note.rank}-{restart}.json"
    replace_text(folder / name, json.dumps(asdict(note), indent=1), 0o600)


def read_failures(run_dir: Path, restart: int | None = None) -> dict[int, Failure]:
    """The exceptions of all workers that left a note, by rank; of the last start, or of one before."""
    return {rank: Failure(**note) for rank, note in _notes(run_dir, "failure", restart).items()}


def read_beginnings(run_dir: Path) -> list[Beginning]:
    """The workers that have been started, by rank."""
    return [Beginning(**note) for note in _notes(run_dir, "beginning", None).values()]


def read_endings(run_dir: Path, restart: int | None = None) -> list[Ending]:
    """How workers ended, by rank, each with its own exception; of the last start, or of one before."""
    failures, endings = read_failures(run_dir, restart), []
    for rank, note in _notes(run_dir, "ending", restart).items():
        failure = failures.get(rank)
        if failure is not None and failure.pid == note["pid"]:
            note |= {"failure": failure, "time": min(note["time"], failure.time)}
        endings.append(Ending(**note))
    return endings


def _notes(run_dir: Path, kind: str, restart: int | None) -> dict[int, dict[str, Any]]:
    found = {}
    for path in (run_dir / "workers").glob(f"{kind}-*-*.json"):
        _, rank, start = path.stem.split("-")
        if restart in (None, int(start)):
            with contextlib.suppress(OSError, ValueError):
                found[int(rank), int(start)] = json.loads(path.read_text())
    return {rank: note for (rank, _), note in sorted(found.items())}


def root_cause(endings: Sequence[Ending]) -> Ending:
    """The failed worker that caused the other failures: the earliest that did not merely lose a peer.

    A failure of a worker that had been asked to end was caused by that, and counts only if there is no other.

    Raises:
        ValueError: none of the workers failed.
    """
    stopped_at = min((one.asked_at for one in endings if one.asked_at is not None), default=float("inf"))
    failed = [one for one in endings if one.failed]
    return min(failed, key=lambda one: (one.time > stopped_at, one.is_consequence, one.time, one.rank))


def whereabouts(endings: Sequence[Ending], cause: Ending) -> str:
    """The peers that a worker may have lost: those that have raised nothing themselves; may be empty.

    Their times say nothing: the sockets of a process close before it ends.
    """
    ended = [one.rank for one in endings if not one.failed]
    others = [one.rank for one in endings if one.failure is None and one is not cause]
    if ended:
        return f" ({name_ranks(ended)} had ended without an error)"
    return f" ({name_ranks(others)} had not failed)" if others else ""


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"


def one_line(message: str) -> str:
    """`message` without line breaks and locations in torch's C++ sources; of a long one its beginning and its end."""
    return shortened(on_one_line(re.sub(r"\[\S+\.(cc|cpp|h):\d+\]", "", message)), LONGEST_MESSAGE)


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"  # real-time signals have no names
