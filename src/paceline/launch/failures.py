"""Why a run failed: the note that a failing worker writes, and which of several failures caused the others."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.regular_files import make_run_folder, replace_text
from paceline.spec.codec import JsonValue
from paceline.words import name_ranks, on_one_line

LOST_PEER_TYPES = frozenset({"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
"""Messages of torch.distributed when a peer is gone. Python's own ConnectionResetError (from a download, say) is
not among them."""

# Gloo's, then those of stores and of the rendezvous, then NCCL's.
LOST_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "recv operation timed out",
    "send operation timed out",
    "wait timeout",
    "socket timeout",
    "application timeout caused pair closure",
    "connectfullmesh failed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclremoteerror",
    "connection closed by remote peer",
    "nccl communicator was aborted",
    "nccl communicator encountered error set by",
    "watchdog caught collective operation timeout",
)

LONGEST_MESSAGE = 400
"""The maximum number of characters quoted from an exception's message; the traceback has the rest."""


@dataclass(frozen=True)
class Failure(JsonValue):
    """The exception that ended a worker, as the worker itself saw it."""

    rank: int
    pid: int
    time: float
    """Seconds since the epoch when the exception left the user's program."""
    type: str
    message: str
    traceback: str
    """The traceback from the user's program on; empty for a user's mistake, whose message is enough."""
    is_user_error: bool = False

    def write(self, path: Path) -> None:
        """Write this note to `path` atomically.

        Raises:
            OSError: the note cannot be written.
        """
        make_run_folder(path.parent)
        replace_text(path, json.dumps(asdict(self), indent=1), 0o600)

    @property
    def exit_code(self) -> int | None:
        """The argument of `sys.exit`; None for any other exception."""
        return int(self.message) if self.type == SystemExit.__name__ else None


@dataclass(frozen=True)
class Ending:
    """How one worker process ended."""

    rank: int
    pid: int
    exit_code: int
    """The exit code as in subprocess, negative for a signal."""
    time: float
    """Seconds since the epoch: when its exception was raised, else when the process was seen to end."""
    failure: Failure | None = None
    out_of_memory: bool = False
    """Whether the kernel has killed this process because memory ran out."""
    step: int | None = None
    """Optimizer updates done."""
    collective: str = ""
    """The last collective it entered."""
    hostname: str = ""
    """The name of the worker's node; empty: this node."""
    trained_s: float | None = None
    """Seconds between the worker's first update and its end; None: it made no update."""

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def is_consequence(self) -> bool:
        """Whether the worker failed only because a peer had gone or fallen silent."""
        return self.failure is not None and is_consequence(self.failure)


def spare_failure_path(heartbeat: Path) -> Path:
    """Where a worker leaves its note if the run folder cannot be written to: beside its heartbeat."""
    return heartbeat.with_name(f"{heartbeat.name}.json")


def failure_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "failures" / f"rank{rank}.json"


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"


def stack_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.stack"


def is_consequence(failure: Failure) -> bool:
    """Whether the exception tells only that a peer had gone or fallen silent."""
    message = failure.message.lower()
    if failure.type == "PeerLost":
        return True
    return failure.type in LOST_PEER_TYPES and any(text in message for text in LOST_PEER_MESSAGES)


def root_cause(endings: Sequence[Ending], *, stopped_at: float) -> Ending:
    """The failed worker that caused the other failures: the earliest that did not merely lose a peer.

    A failure after `stopped_at` (seconds since the epoch), when the launcher asked all workers to end, was caused by
    that and counts only if there is no other.

    Raises:
        ValueError: none of the workers failed.
    """
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda e: (e.time > stopped_at, e.is_consequence, e.time, e.rank))


def whereabouts(endings: Sequence[Ending], stopped_at: float) -> str:
    """The peers that a worker lost: those that had ended, else those busy until the stop; may be empty."""
    # Its sockets close before a process ends: a peer that left first may be seen to end last.
    ended = sorted(e.rank for e in endings if not e.failed and e.time <= stopped_at)
    busy = sorted(e.rank for e in endings if e.failure is None and e.time > stopped_at)
    if ended:
        return f" ({name_ranks(ended)} had ended without an error)"
    return f" ({name_ranks(busy)} kept it waiting)" if busy else ""


def one_line(message: str) -> str:
    """`message` without line breaks and without locations in torch's C++ sources."""
    line = on_one_line(re.sub(r"\[\S+\.(cc|cpp|h):\d+\]", "", message))
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"  # real-time signals have no names
