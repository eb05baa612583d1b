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
from typing import Any, Literal

from paceline.regular_files import make_run_folder, replace_text
from paceline.words import number_of

Kind = Literal["failure", "started", "ended"]
"""Of a note."""

TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FOREIGN = re.compile(rf"/site-packages/|/lib/python3\.\d+/|^{re.escape(str(Path(__file__).parents[1]))}/")
"""Files that are not a user's own."""


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

    @property
    def innermost(self) -> tuple[str, str]:
        """(type, message) of the exception that began it: one of another process, if the message has its traceback."""
        kind, message = _raised(self.message.splitlines()) if TRACEBACK in self.message else (self.type, self.message)
        return kind.rpartition(".")[2], message


@dataclass(frozen=True)
class WorkerProcess:
    """A worker's process, and how it ended."""

    rank: int
    world_size: int
    pid: int
    hostname: str
    exit_code: int | None = None
    """The exit code as in subprocess, negative for a signal; None: it has not ended."""
    time: float = 0.0
    """Seconds since the epoch: when its exception was raised, else when the process ended."""
    asked_at: float | None = None
    """When it was asked to end, in seconds since the epoch; None: it was not."""
    out_of_memory: bool = False
    """Whether the kernel counted a process that it killed because memory ran out."""
    step: int | None = None
    """Optimizer updates done; None for a program without a `Run`."""
    collective: str = ""
    """The last collective it entered."""
    place: str = ""
    """Where its program was when it failed, such as "train.py, line 12"; empty where its output does not say so."""
    failure: Failure | None = None

    @property
    def line(self) -> str:
        """The worker's line in a report."""
        code = self.exit_code
        how = "lost" if code is None else "ended" if not code else f"ended by {signal_name(-code)}"
        how = f"ended with exit code {code}" if code is not None and code > 0 else how
        step = "" if self.step is None else f" after {number_of(self.step, 'step')}"
        place = f" at {self.place}" if self.place else ""
        last = f"; its last collective was {self.collective}" if self.collective else ""
        return f"rank {self.rank} on {self.hostname}: {how}{step}{place}{last}"

    @property
    def was_asked(self) -> bool:
        """Whether it had been asked to end before it failed."""
        return self.asked_at is not None and self.time >= self.asked_at

    @property
    def is_consequence(self) -> bool:
        """Whether the worker failed only because a peer had gone or fallen silent."""
        return self.failure is not None and self.failure.is_consequence


def write_note(run_dir: Path, note: Failure | WorkerProcess, restart: int = 0) -> None:
    """Write a note atomically, readable only by the user; `restart` is how often the worker has been started before.

    Raises:
        OSError: the folder cannot be written to.
    """
    kind: Kind = "failure" if isinstance(note, Failure) else "started" if note.exit_code is None else "ended"
    path = note_path(run_dir, kind, note.rank, restart)
    make_run_folder(path.parent)
    replace_text(path, json.dumps(asdict(note), indent=1), 0o600)


def note_path(run_dir: Path, kind: Kind, rank: int, restart: int) -> Path:
    return run_dir / "workers" / f"{kind}-{rank}-{restart}.json"


def read_processes(run_dir: Path, kind: Literal["started", "ended"], restart: int | None = None) -> list[WorkerProcess]:
    """The processes of all workers that have started or ended, by rank, each with its own exception; of the last start,
    or of one before."""
    failures, processes = _notes(run_dir, "failure", restart), []
    for rank, note in _notes(run_dir, kind, restart).items():
        failure = failures.get(rank)
        if failure is not None and failure["pid"] == note["pid"]:
            note |= {"failure": Failure(**failure), "time": min(note["time"], failure["time"])}
        processes.append(WorkerProcess(**note))
    return processes


def _notes(run_dir: Path, kind: Kind, restart: int | None) -> dict[int, dict[str, Any]]:
    found = {}
    for path in (run_dir / "workers").glob(f"{kind}-*-*.json"):
        _, rank, start = path.stem.split("-")
        if restart in (None, int(start)):
            with contextlib.suppress(OSError, ValueError):
                found[int(rank), int(start)] = json.loads(path.read_text())
    return {rank: note for (rank, _), note in sorted(found.items())}


def failure_in(log: str, process: WorkerProcess) -> Failure | None:
    """The exception of a program that left no note of it, from the last traceback in its output; it has the time of
    `process`."""
    # Torch names the rank before each line once there is a process group.
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in log.replace("\0", "\\x00").splitlines()]
    starts = [number for number, line in enumerate(lines) if line == TRACEBACK]
    if not starts:
        return None
    of_last = lines[starts[-1] + 1 :]
    while len(starts) > 1 and lines[max(0, starts[-1] - 2)].startswith(_CHAINED):
        starts.pop()
    kind, message = _raised(of_last)
    files = re.findall(r'^  File "([^"]+)", line', "\n".join(of_last), re.MULTILINE)
    is_of_torch = kind == "RuntimeError" or kind.startswith("torch.distributed.")
    return Failure(
        rank=process.rank,
        pid=process.pid,
        time=process.time,
        type=kind.rpartition(".")[2],
        message=message,
        traceback="\n".join(lines[starts[-1] :]) + "\n",
        is_consequence=is_of_torch and "/torch/distributed/" in "".join(files[-1:]),
    )


def place_in(log: str, exit_code: int) -> str:
    """Where a program of this output and exit code failed, as `WorkerProcess.place` has it: the innermost line of a
    user's own file in its last traceback, or in what Python's fault handler wrote of its main thread."""
    is_crash = exit_code < 0 and exit_code != -signal.SIGTERM  # by which who has raised may be ended
    start = log.rfind("Fatal Python error: " if is_crash else TRACEBACK) if exit_code <= 1 else -1
    if start < 0:
        return ""
    text = log[max(start, log.rfind("hread 0x")) :] if is_crash else log[start:]  # of all threads, the main one is last
    frames = re.findall(r'File "([^"<>]+)", line (\d+)', text)
    own = [f"{Path(file).name}, line {line}" for file, line in frames if not _FOREIGN.search(file)]
    return own[0 if is_crash else -1] if own else ""  # a crash is told from its innermost call on


def _raised(lines: Sequence[str]) -> tuple[str, str]:
    """(type, message) of the exception below a traceback; of the innermost one where its message has a traceback of its
    own, as that of another process: torch's loaders and process pools pass on exceptions so."""
    begins = max((number for number, line in enumerate(lines, 1) if line.endswith(TRACEBACK)), default=0)
    told = "\n".join(line for line in lines[begins:] if line and not line.startswith(" "))
    kind, _, message = told.partition(": ")
    return kind, message


def root_cause(ended: Sequence[WorkerProcess]) -> WorkerProcess | None:
    """The failed worker that caused the other failures: the earliest that did not merely lose a peer; None: no failure.

    A failure of a worker that had been asked to end was caused by that, and counts only if there is no other.
    """
    stopped_at = min((one.asked_at for one in ended if one.asked_at is not None), default=float("inf"))
    failed = [one for one in ended if one.exit_code]
    return min(failed, key=lambda one: (one.time > stopped_at, one.is_consequence, one.time, one.rank), default=None)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # real-time signals have no names


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"
