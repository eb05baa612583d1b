"""Why a run failed or does not go on: hangs found from what its workers do, notes of how they ended, which failure
caused the others, and the one-screen report.

The supervisor of a worker notes its start, and how it ended, in the folder `workers` of the run folder: as JSON, so
that the launcher reads the notes of all nodes.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import reason_of, shortened
from paceline.files import make_run_folder, replace_text
from paceline.heartbeat import Vitals
from paceline.words import name_ranks, number_of

STALE_S = 5.0
"""A worker without a heartbeat for this long is stuck outside Python, even if its last heartbeat showed progress."""
HANG_TIMEOUT_S = 60.0
"""How long workers of a `Run` wait for another one before that is a hang."""
MOST_EVIDENCE_LINES = 25
MOST_WORKER_LINES = 12
MOST_MESSAGE_CHARACTERS = 400
TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FOREIGN = re.compile(rf"/site-packages/|/lib/python3\.\d+/|^{re.escape(str(Path(__file__).parents[1]))}/")
"""Files that are not a user's own."""


@dataclass(frozen=True, kw_only=True)
class WorkerState(Vitals):
    """What a running worker was doing at one moment; seconds in which the observer did not run itself do not count."""

    rank: int
    pid: int
    hostname: str = ""
    local_rank: int = 0
    heartbeat_age_s: float | None = None
    """Seconds since it last posted its state; None: not known."""
    memory_bytes: int | None = None
    """Memory of the process that lies in RAM; None: not known."""

    @property
    def doing(self) -> str:
        """The state as a phrase for a report."""
        if self.inside_s is not None:
            return f"in {self.collective} for {self.inside_s:.1f} s"
        return f"in no collective; its last was {self.collective}" if self.collective else "in no collective so far"

    @property
    def line(self) -> str:
        """The worker's line in a report."""
        step = "" if self.step is None else f"step {self.step}, "
        return f"rank {self.rank} (pid {self.pid} on {self.hostname}): {step}{self.doing}"


@dataclass(frozen=True)
class Hang:
    """A run that makes no progress."""

    kind: Literal["hung", "mismatch"]
    culprits: tuple[int, ...]
    """The ranks that the others wait for; all ranks if `kind` is "mismatch"."""
    waiting: tuple[int, ...]
    seconds: float


def find_hang(states: Sequence[WorkerState], bound_s: float) -> Hang | None:
    """Find a hang in the `states` of all workers; None unless something has lasted for `bound_s`.

    A worker that computes for long is no hang unless another one waits for it.
    """
    waiting = [state for state in states if _waits(state, bound_s)]
    if not waiting:
        return None
    ranks, longest_s = tuple(state.rank for state in waiting), max(state.inside_s or 0.0 for state in waiting)
    if len(waiting) == len(states):
        return Hang("mismatch", ranks, ranks, longest_s)
    # A worker that has just entered the same collective has ended the wait; the next check will show it.
    awaited = tuple(state.rank for state in states if state not in waiting and not _waits(state, 0.0))
    return Hang("hung", awaited, ranks, longest_s) if awaited else None


def _waits(state: WorkerState, bound_s: float) -> bool:
    """Whether the worker has been in a collective for that long while its interpreter still runs."""
    if state.inside_s is None or state.inside_s < bound_s:
        return False
    return state.heartbeat_age_s is None or state.heartbeat_age_s < STALE_S


@dataclass(frozen=True)
class Failure:
    """The exception that ended a worker."""

    time: float
    """Seconds since the epoch when it left the user's program."""
    message: str
    """Its type and message; of a mistake of the user, the sentence alone."""
    traceback: str
    """Empty for a mistake of the user."""
    is_user_error: bool = False
    is_consequence: bool = False
    """Whether the worker failed only because a peer had gone: it was waiting for one in a collective."""

    @property
    def told(self) -> str:
        """The message on a line, the type without its module."""
        kind, colon, message = self.message.partition(":")
        return shortened(" ".join((kind.rpartition(".")[2] + colon + message).split()), MOST_MESSAGE_CHARACTERS)


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
    output: str = ""
    """The last lines of its output."""
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
    def is_consequence(self) -> bool:
        """Whether the worker failed only because a peer had gone or fallen silent."""
        return self.failure is not None and self.failure.is_consequence


def write_note(run_dir: Path, process: WorkerProcess, restart: int = 0) -> None:
    """Note a worker's process, readable only by the user, or tell standard error how it failed: a full disk is no
    reason not to train. `restart` is how often it has been started before."""
    try:
        make_run_folder(run_dir / "workers")
        note = json.dumps(asdict(process), indent=1)
        replace_text(run_dir / "workers" / f"{process.rank}-{restart}.json", note, 0o600)
    except OSError as problem:
        if process.exit_code:
            print(f"{process.output}\npaceline: {process.line} (not noted: {reason_of(problem)})", file=sys.stderr)


def read_notes(run_dir: Path, restart: int | None = None) -> list[WorkerProcess]:
    """The processes of all workers, by rank; of their last start, or of one before."""
    found = {}
    for path in (run_dir / "workers").glob("*-*.json"):
        rank, start = map(int, path.stem.split("-"))
        if restart in (None, start):
            with contextlib.suppress(OSError, ValueError):
                note = json.loads(path.read_text())
                failure = None if note["failure"] is None else Failure(**note["failure"])
                found[rank, start] = WorkerProcess(**note | {"failure": failure})
    return list({rank: process for (rank, _), process in sorted(found.items())}.values())


def failure_path(heartbeat: Path, pid: int) -> Path:
    """Where a process that has this file as its heartbeat leaves its `Failure` to its supervisor."""
    return heartbeat.with_name(f"failure-{pid}.json")


def failure_in(log: str, time: float) -> Failure | None:
    """The failure of a program that left no note of it, from the last traceback in its output, which came at `time`."""
    # Torch names the rank before each line once there is a process group.
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in log.replace("\0", "\\x00").splitlines()]
    starts = [number for number, line in enumerate(lines) if line == TRACEBACK]
    if not starts:
        return None
    of_last = "\n".join(lines[starts[-1] :])
    while len(starts) > 1 and lines[max(0, starts[-1] - 2)].startswith(_CHAINED):
        starts.pop()
    message, files = raised_in(of_last), re.findall(r'^  File "([^"]+)", line', of_last, re.MULTILINE)
    is_of_torch = re.match(r"RuntimeError\b|torch\.distributed\.", message) is not None
    is_consequence = is_of_torch and "/torch/distributed/" in "".join(files[-1:])
    return Failure(time, message, "\n".join(lines[starts[-1] :]) + "\n", is_consequence=is_consequence)


def raised_in(text: str) -> str:
    """The type and message of the exception that `text` tells, below its last traceback: that may be one of another
    process in the message, as torch's loaders and process pools pass on exceptions."""
    below = text.rpartition(TRACEBACK)[2]
    return re.sub(r"\A(?: .*\n|\n)+", "", below).strip()


def place_in(log: str, exit_code: int) -> str:
    """Where a program of this output and exit code failed, as `WorkerProcess.place` has it: the innermost line of a
    user's own file in its last traceback, or in what Python's fault handler wrote of its main thread."""
    is_crash = exit_code < 0 and exit_code != -signal.SIGTERM  # a worker that has raised may be ended by SIGTERM
    has_failed_by_it = exit_code < 0 or exit_code == 1
    start = log.rfind("Fatal Python error: " if is_crash else TRACEBACK) if has_failed_by_it else -1
    if start < 0:
        return ""
    text = log[max(start, log.rfind("hread 0x")) :] if is_crash else log[start:]  # of all threads, the main one is last
    frames = re.findall(r'File "([^"<>]+)", line (\d+)', text)
    own = [f"{Path(file).name}, line {line}" for file, line in frames if not _FOREIGN.search(file)]
    return own[0 if is_crash else -1] if own else ""  # a crash is told from its innermost call on


def root_cause(processes: Sequence[WorkerProcess]) -> WorkerProcess | None:
    """The failed worker that caused the other failures: the earliest that did not merely lose a peer; None: no failure.

    A failure of a worker that had been asked to end was caused by that, and counts only if there is no other; its own
    node's clock says so.
    """
    stopped_at = min((one.asked_at for one in processes if one.asked_at is not None), default=float("inf"))
    failed = [one for one in processes if one.exit_code]
    late = {one.rank: one.time > (stopped_at if one.is_consequence else one.asked_at or one.time) for one in failed}
    return min(failed, key=lambda one: (late[one.rank], one.is_consequence, one.time, one.rank), default=None)


def signal_name(number: int) -> str:
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")  # real-time ones have none


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"


_TEXTS: dict[str, tuple[str, str]] = {
    "exception": (
        "{who} failed{peers} with {what}",
        "Read the traceback; with one worker, plain `python` runs the program under a debugger.",
    ),
    "exit": ("{who} ended with exit code {exit_code}.", "Read the last lines of the worker's log, {log}."),
    "signal": (
        "{who} was killed by {signal}{place}.",
        "Read where Python was; a crash in native code is often a mismatch of versions: `paceline doctor`.",
    ),
    "out_of_memory": (
        "{who} was killed by the kernel: out of memory.",
        "Try more virtual_shards, each of fewer samples, fewer workers a node, or a higher memory limit.",
    ),
    "lost_touch": (
        "{who} lost touch with the other workers{peers}: {what}",
        "Look at why they ended; where none did, at the network between the nodes: `paceline doctor --hosts …`.",
    ),
    "hung": (
        "{who} {hangs}{in_step}, for {seconds:.1f} s; waiting: {waiting}.",
        "Look at the stack: a loop, a lock, a slow read, or code that only some ranks run before a collective; "
        "raise --hang-timeout (of a job --set where.hang_timeout_s=300) if that work is meant to take so long, or if a "
        "debugger has stopped the process.",
    ),
    "mismatch": (
        "{who} have waited for each other for {seconds:.1f} s: {doing}.",
        "Compare the collectives: ranks in different ones took different branches, as by `if run.rank == 0: "
        "run.evaluate(…)`; --debug-comm (of a job --set plan.debug_comm=true) names the first difference. In the same "
        "one, data does not get through: `paceline doctor --hosts …`.",
    ),
    "peer_lost": (
        "{who} ended{in_step} without a word: killed by a signal, or by os._exit.",
        "Its exit code or signal stands in the launcher's own output; `dmesg` tells of a kill for memory.",
    ),
    "node_lost": (
        "Node {node} ({ranks}) is lost: {how}.",
        "Is {node} up? `ping {node}`; if so, its system's log says what ended the agent. Then start the run again, "
        "with this node or without.",
    ),
}
"""By cause: the sentence, and what to try next; facts stand in braces."""

_ON_EXIT = {
    -signal.SIGKILL: "Somebody, a scheduler or a script sent it: the kernel has not counted a kill for memory here.",
    -signal.SIGABRT: "Look at where the workers were: backends end a process when ranks call different collectives, as "
    "after loops of different lengths or in a branch that only some ranks take. Else read where Python was.",
    **dict.fromkeys(
        (-signal.SIGTERM, 128 + signal.SIGTERM),
        "It was ended by SIGTERM from outside this run; see who sent it: a scheduler, a limit, a user.",
    ),
}
"""What to try next by the exit code, where that says more than the cause."""


@dataclass(frozen=True)
class FailureReport:
    """Why a run failed; failure.json and failure.txt in the run folder hold it."""

    cause: str
    """A key of `_TEXTS`."""
    ranks: tuple[int, ...]
    """The ranks to blame; what follows is of the first."""
    hostname: str
    pid: int | None
    step: int | None
    """Optimizer updates done before the failure."""
    noticed_at: float
    """Time of the failure in seconds since the epoch."""
    sentence: str
    """The failed workers and what happened to them."""
    next: str
    """What to try."""
    workers: tuple[str, ...]
    """What every worker was doing, one line per worker."""
    exit_code: int | None = None
    """The exit code as in subprocess, negative for a signal; None: the worker did not end by itself."""
    evidence: str = ""
    """A traceback, the stacks of hanging workers, or the last lines of a log."""
    is_user_error: bool = False
    """Whether the sentence says all: a mistake that the user can correct."""

    def text(self) -> str:
        """The report as text for the terminal."""
        after = [] if self.step is None else [f"After     {number_of(self.step, 'step')}"]
        lines = [self.sentence, "", *after, f"Next      {self.next}", "", "The workers when it was noticed:"]
        lines += [f"  {line}" for line in self.workers[:MOST_WORKER_LINES]]
        if len(self.workers) > MOST_WORKER_LINES:
            lines.append(f"  … and {len(self.workers) - MOST_WORKER_LINES} more, in failure.json")
        if self.evidence:
            lines += ["", "Evidence:", *self.evidence.rstrip().splitlines()[-MOST_EVIDENCE_LINES:]]
        return "\n".join(lines) + "\n"

    def save(self, run_dir: Path, name: str = "failure") -> Path | None:
        """Write `name`.json and `name`.txt, readable only by the user; returns the second, None where the folder cannot
        be written to."""
        try:
            for suffix, text in (("json", json.dumps(asdict(self), indent=1) + "\n"), ("txt", self.text())):
                replace_text(run_dir / f"{name}.{suffix}", text, 0o600)
        except OSError:
            return None
        return run_dir / f"{name}.txt"


@dataclass(frozen=True)
class NodeLoss:
    """A node whose agent has ended without a word; its workers are lost with it."""

    hostname: str
    """Empty: this one, which has all workers of the run."""
    time: float
    """Seconds since the epoch when the loss was noticed."""
    how: str
    """What is known of it: how the agent ended, or what ssh said."""


def silent_node(run_dir: Path, within_s: float) -> NodeLoss | None:
    """The node of a worker whose end nobody has noted within so many seconds, though all agents have ended; or None."""
    deadline = time.monotonic() + within_s
    while silent := [one for one in read_notes(run_dir) if one.exit_code is None]:
        if time.monotonic() > deadline:
            return NodeLoss(silent[0].hostname, time.time(), "nothing tells how its workers ended")
        time.sleep(0.1)
    return None


def describe_failure(run_dir: Path, loss: NodeLoss | None = None, restart: int | None = None) -> FailureReport | None:
    """Diagnose why a run failed, from the notes of its workers; None for a run without a failure.

    `restart`: which start of the workers, 0 for the first; None: the last one.

    A hang that a worker has found, and a lost node, take precedence over the errors they cause in other workers; an
    earlier error of a worker takes precedence over a lost node.
    """
    with contextlib.suppress(OSError, ValueError):  # the report that a worker has written of a hang
        found = json.loads((run_dir / "failure.json").read_text())
        return FailureReport(**found | {"ranks": tuple(found["ranks"]), "workers": tuple(found["workers"])})
    processes = read_notes(run_dir, restart)
    ended, root = [one for one in processes if one.exit_code is not None], root_cause(processes)
    if loss is not None and (lost := [one for one in processes if loss.hostname in ("", one.hostname)]):
        until = min(loss.time, *(one.asked_at for one in processes if one.asked_at is not None), float("inf"))
        if root is None or root.is_consequence or root.time > until:
            ranks = tuple(one.rank for one in lost)
            facts = {"ranks": name_ranks(ranks), "how": loss.how, "world_size": lost[0].world_size}
            workers = [*lost, *(one for one in ended if one not in lost)]
            step = min((one.step for one in workers if one.step is not None), default=None)
            return report_of("node_lost", workers, ranks, facts, pid=None, step=step, noticed_at=loss.time)
    return None if root is None else _of_ending(root, ended, log_path(run_dir, root.rank))


def _of_ending(root: WorkerProcess, ended: Sequence[WorkerProcess], log: Path) -> FailureReport:
    """The report of a failure that began in the worker `root`."""
    exit_code, failure = root.exit_code or 0, root.failure
    # Peers that it may have lost, as after a loop with fewer steps; times say nothing: sockets close before processes.
    gone = [one.rank for one in ended if not one.exit_code]
    elsewhere = [f", while rank {one.rank} was at {one.place}" for one in ended if one.place not in ("", root.place)]
    facts: dict[str, Any] = {
        "world_size": root.world_size,
        "exit_code": exit_code,
        "log": log,
        "signal": signal_name(-exit_code),
        "place": f" at {root.place}" if root.place else "",
        "peers": f" ({name_ranks(gone)} had ended without an error)" if gone else "",
    }
    if exit_code == -signal.SIGABRT and root.place:
        facts["place"] += "".join(elsewhere[:1])
    values: dict[str, Any] = {"exit_code": root.exit_code, "noticed_at": root.time, "evidence": root.output}
    if exit_code in _ON_EXIT and not root.out_of_memory:
        values["next"] = _ON_EXIT[exit_code]
    cause = "out_of_memory" if root.out_of_memory else "signal" if exit_code < 0 else "exit"
    if failure is not None:
        cause, values["evidence"] = "lost_touch" if failure.is_consequence else "exception", failure.traceback
        facts["what"] = failure.told
        if failure.is_user_error:
            values |= {"is_user_error": True, "sentence": failure.message, "next": "Do what the sentence says."}
    return report_of(cause, ended, (root.rank,), facts, **values)


def describe_hang(hang: Hang, states: Sequence[WorkerState], stacks: dict[int, str], now: float) -> FailureReport:
    """The report of a hang; `stacks` are those of the culprits, by rank."""
    is_one = len(hang.culprits) == 1
    facts = {
        "doing": next(state.doing for state in states if state.rank in hang.culprits),
        "seconds": hang.seconds,
        "waiting": name_ranks(hang.waiting),
        "hangs": "hangs" if is_one else "hang",
    }
    if not is_one:
        facts["who"] = f"{name_ranks(hang.culprits).capitalize()} of {len(states)}"
    evidence = "\n".join(f"Stack of rank {rank}:\n{text}" for rank, text in stacks.items() if text)
    return report_of(hang.kind, states, hang.culprits, facts, noticed_at=now, evidence=evidence)


def report_of(
    cause: str,
    workers: Sequence[WorkerProcess] | Sequence[WorkerState],
    ranks: tuple[int, ...],
    facts: dict[str, Any],
    **values: Any,
) -> FailureReport:
    """The texts of a cause, filled in with `facts` and those of the first worker to blame; `values` are further fields
    of the report."""
    blamed_first: list[Any] = sorted(workers, key=lambda one: (one.rank not in ranks, one.rank))
    first = blamed_first[0]
    facts = {
        "who": f"Rank {first.rank} of {facts.get('world_size', len(workers))} (pid {first.pid} on {first.hostname})",
        "in_step": "" if first.step is None else f" in step {first.step + 1}",
        "node": first.hostname,
        "peers": "",
        **facts,
    }
    sentence, advice = (text.format_map(facts) for text in _TEXTS[cause])
    fields = {
        "hostname": first.hostname,
        "pid": first.pid,
        "step": first.step,
        "sentence": sentence,
        "next": advice,
        "workers": tuple(one.line for one in blamed_first),
    }
    return FailureReport(cause=cause, ranks=ranks, **fields | values)
