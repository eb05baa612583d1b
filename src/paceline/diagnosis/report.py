"""The one-screen failure report: which worker, where, why, what the others did, what to try next."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.diagnosis.failures import Failure, WorkerProcess, log_path, read_processes, root_cause, signal_name
from paceline.diagnosis.hang import Hang, WorkerState
from paceline.errors import shortened
from paceline.regular_files import replace_text
from paceline.words import name_ranks, number_of

MOST_EVIDENCE_LINES = 25
MOST_TAIL_BYTES = 64 << 10
MOST_WORKER_LINES = 12
MOST_MESSAGE_CHARACTERS = 400

Cause = Literal[
    "exception",
    "exit",
    "signal",
    "out_of_memory",
    "lost_touch",
    "hung",
    "mismatch",
    "peer_lost",
    "node_lost",
]

_TEXTS: dict[Cause, tuple[str, str]] = {
    "exception": (
        "{who} failed{peers} with {what}",
        "Read the traceback; `paceline launch --launcher debug …` runs the program in one process, under a debugger if "
        "you like.",
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
        "raise the hang timeout if that work is meant to take so long, or if a debugger has stopped the process.",
    ),
    "mismatch": (
        "{who} have waited for each other for {seconds:.1f} s: {doing}.",
        "Compare the collectives: ranks in different ones took different branches, as by `if run.rank == 0: "
        "run.evaluate(…)` (debug_comm names the first difference); in the same one, data does not get through: "
        "`paceline doctor --hosts …`.",
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
    128
    + signal.SIGTERM: "It was ended by SIGTERM from outside this run; see who sent it: a scheduler, a limit, a user.",
}
"""What to try next by the exit code, where that says more than the cause."""


@dataclass(frozen=True)
class FailureReport:
    """Why a run failed; failure.json and failure.txt in the run folder hold it."""

    cause: Cause
    sentence: str
    """The failed workers and what happened to them, in a sentence."""
    ranks: tuple[int, ...]
    """The ranks to blame."""
    hostname: str
    pid: int | None
    exit_code: int | None
    """The exit code as in subprocess, negative for a signal; None: the worker did not end by itself."""
    step: int | None
    """Optimizer updates done before the failure."""
    noticed_at: float
    """Time of the failure in seconds since the epoch."""
    next: str
    """What to try."""
    evidence: str
    """A traceback, the stacks of hanging workers, or the last lines of a log; may be empty."""
    workers: tuple[str, ...]
    """What every worker was doing, one line per worker."""
    is_user_error: bool = False
    """Whether the sentence says all: a mistake that the user can correct."""

    def text(self) -> str:
        """The report as text for the terminal."""
        lines = [self.sentence, ""]
        if self.step is not None:
            lines.append(f"After     {number_of(self.step, 'step')}")
        lines.append(f"Next      {self.next}")
        if self.workers:
            shown = self.workers[:MOST_WORKER_LINES]
            lines += ["", "The workers when it was noticed:", *(f"  {line}" for line in shown)]
            if len(self.workers) > len(shown):
                lines.append(f"  … and {len(self.workers) - len(shown)} more, in failure.json")
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
    time: float
    """Seconds since the epoch when the loss was noticed."""
    how: str
    """What is known of it: how the agent ended, or what ssh said."""
    workers: tuple[WorkerProcess, ...]


def describe_failure(run_dir: Path, loss: NodeLoss | None = None, restart: int | None = None) -> FailureReport | None:
    """Diagnose why a run failed, from the notes of its workers; None for a run without a failure.

    `restart`: of the start before which there had been so many; None: of the last one.

    A hang that a worker has found, and a lost node, take precedence over the errors they cause in other workers; an
    earlier error of a worker takes precedence over a lost node.
    """
    try:  # the report that a worker has written of a hang
        found = json.loads((run_dir / "failure.json").read_text())
        return FailureReport(**found | {"ranks": tuple(found["ranks"]), "workers": tuple(found["workers"])})
    except (OSError, ValueError):
        pass
    ended = read_processes(run_dir, "ended", restart)
    root = root_cause(ended)
    if loss is not None and (root is None or root.is_consequence or root.was_asked or root.time > loss.time):
        ranks = tuple(one.rank for one in loss.workers)
        return _report(
            "node_lost",
            [*loss.workers, *(one for one in ended if one.rank not in ranks)],
            ranks,
            {"ranks": name_ranks(ranks), "how": loss.how, "world_size": loss.workers[0].world_size},
            pid=None,
            step=min((one.step for one in ended if one.step is not None), default=None),
            noticed_at=loss.time,
        )
    return None if root is None else _of_ending(root, ended, log_path(run_dir, root.rank))


def _of_ending(root: WorkerProcess, ended: Sequence[WorkerProcess], log: Path) -> FailureReport:
    """The report of the worker that ended first, of its own."""
    exit_code, failure = root.exit_code or 0, root.failure
    facts = {"exit_code": exit_code, "log": log, "signal": signal_name(-exit_code), "world_size": root.world_size}
    facts["place"] = f" at {root.place}" if root.place else ""
    elsewhere = [one for one in ended if one.place not in ("", root.place)]
    if exit_code == -signal.SIGABRT and root.place and elsewhere:
        facts["place"] = f" at {root.place}, while rank {elsewhere[0].rank} was at {elsewhere[0].place}"
    if failure is None:
        cause: Cause = "out_of_memory" if root.out_of_memory else "signal" if exit_code < 0 else "exit"
        evidence = "\n".join(tail_of(log).splitlines()[-MOST_EVIDENCE_LINES:])
    else:
        cause, evidence = "lost_touch" if root.is_consequence else "exception", failure.traceback
        facts["what"] = _message_of(failure)
        # The peers that it may have lost, as after a loop with fewer steps; times say nothing: sockets close before a
        # process ends.
        gone = [one.rank for one in ended if not one.exit_code]
        facts["peers"] = f" ({name_ranks(gone)} had ended without an error)" if gone else ""
    values: dict[str, Any] = {"exit_code": root.exit_code, "noticed_at": root.time, "evidence": evidence}
    if advice := _ON_EXIT.get(exit_code):
        values["next"] = advice
    if failure is not None and failure.is_user_error:
        values |= {"is_user_error": True, "sentence": failure.message}
    return _report(cause, ended, (root.rank,), facts, **values)


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
    return _report(hang.kind, states, hang.culprits, facts, noticed_at=now, evidence=evidence)


def describe_exception(failure: Failure, world_size: int, states: Sequence[WorkerState]) -> FailureReport:
    """The report of an exception, by the worker that it ends; `states` are those that it knows, its own at least."""
    facts = {"what": _message_of(failure), "world_size": world_size}
    evidence = failure.traceback
    return _report("exception", states, (failure.rank,), facts, noticed_at=failure.time, evidence=evidence)


def describe_lost_peer(lost: WorkerState, states: Sequence[WorkerState], now: float) -> FailureReport:
    """The report on a worker that has ended without a note, by a worker that was waiting for it."""
    return _report("peer_lost", states, (lost.rank,), {}, noticed_at=now)


def _report(
    cause: Cause,
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
    sentence, advice = _TEXTS[cause]
    fields = {
        "ranks": ranks,
        "hostname": first.hostname,
        "pid": first.pid,
        "exit_code": None,
        "step": first.step,
        "evidence": "",
        "sentence": sentence.format_map(facts),
        "next": advice.format_map(facts),
        "workers": tuple(one.line for one in blamed_first),
        **values,
    }
    return FailureReport(cause=cause, **fields)


def _message_of(failure: Failure) -> str:
    kind, message = failure.innermost
    return ": ".join(filter(None, (kind, shortened(" ".join(message.split()), MOST_MESSAGE_CHARACTERS))))


def tail_of(path: Path) -> str:
    """The end of a log; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def of_the_user(stacks: str) -> str:
    """Python's dump of all threads without Paceline's own threads, and without Python's own start."""
    ours = re.compile(r"paceline/(train/watch|comm/aggregator)\.py")
    threads = [thread for thread in stacks.split("\n\n") if not ours.search(thread)]
    return "\n".join(line for line in "\n\n".join(threads).splitlines() if "<frozen runpy>" not in line)
