"""The one-screen failure report: which worker, where, why, what the others did, what to try next."""

from __future__ import annotations

import json
import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.diagnosis.failures import (
    Ending,
    Failure,
    log_path,
    one_line,
    read_endings,
    root_cause,
    signal_name,
    whereabouts,
)
from paceline.diagnosis.hang import Hang, WorkerState
from paceline.regular_files import refuge, replace_text
from paceline.words import name_ranks, number_of

MOST_EVIDENCE_LINES = 25
MOST_TAIL_BYTES = 64 << 10
MOST_WORKER_LINES = 12

Cause = Literal[
    "exception",
    "exit",
    "signal",
    "out_of_memory",
    "lost_touch",
    "hung",
    "stopped",
    "mismatch",
    "peer_lost",
    "node_silent",
    "agent_lost",
    "node_down",
]

_READ_LOG = "Read the last lines of the worker's log, {log}."
_CRASHED = "Read where Python was; a crash in native code is often a mismatch of versions: `paceline doctor`."
_LESS_MEMORY = "Try more virtual_shards, each of fewer samples, fewer workers a node, or a higher memory limit."
_NODE_IS_UP = "Is {node} up? `ping {node}`; then start the run again, with this node or without."

_TEXTS: dict[Cause, tuple[str, str]] = {
    "exception": (
        "{who} failed with {what}",
        "Read the traceback; `paceline launch --launcher debug …` runs the program in one process, under a debugger if "
        "you like.",
    ),
    "exit": ("{who} ended with exit code {exit_code}.", _READ_LOG),
    "signal": ("{who} was killed by {signal}.", _CRASHED),
    "out_of_memory": ("{who} was killed by the kernel: out of memory.", _LESS_MEMORY),
    "lost_touch": (
        "{who} lost touch with the other workers{peers}: {what}",
        "Look at why they ended; where none did, at the network between the nodes: `paceline doctor --hosts …`.",
    ),
    "hung": (
        "{who} {hangs}{in_step}: {waiting} {have} waited for it for {seconds:.1f} s.",
        "Look at the stack: a loop, a lock, a slow read, or code that only some ranks run before a collective; "
        "raise the hang timeout if that work is meant to take so long.",
    ),
    "stopped": (
        "{who} has been stopped for {seconds:.1f} s (SIGSTOP){who_waits}.",
        "Somebody stopped the process (kill -STOP, Ctrl-Z, a debugger); kill -CONT {pid} lets one go on.",
    ),
    "mismatch": (
        "{everybody} have waited for each other for {seconds:.1f} s: {doing}.",
        "Compare the collectives: ranks in different ones took different branches, as by `if run.rank == 0: "
        "run.evaluate(…)` (debug_comm names the first difference); in the same one, data does not get through: "
        "`paceline doctor --hosts …`.",
    ),
    "peer_lost": (
        "{who} ended{in_step} without a word: killed by a signal, or by os._exit.",
        "Its exit code or signal stands in the launcher's own output; `dmesg` tells of a kill for memory.",
    ),
    "node_silent": ("Node {node} ({ranks}) does not answer any more: no power, a hang, or a cut link.", _NODE_IS_UP),
    "agent_lost": (
        "The agent on node {node} was killed or ended; its workers ({ranks}) went with it.",
        "Somebody or something ended the agent; see the system's log on {node} (out of memory, a job limit).",
    ),
    "node_down": ("Node {node} ({ranks}) went down: its connection was closed.", _NODE_IS_UP),
}
"""By cause: the sentence, and what to try next; facts stand in braces."""

_ON_SIGNAL = {
    -signal.SIGKILL: "Somebody, a scheduler or a script sent it: the kernel has not counted a kill for memory here.",
    -signal.SIGABRT: "Compare what the workers were in: where some are in another collective than others, because only "
    "some ranks run code that is a collective, the backend ends the process. Else read where Python was.",
}
_BY_SIGTERM = "{who} was ended by SIGTERM from outside this run (exit code {exit_code})."


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
        """Write `name`.json and `name`.txt, readable only by the user; in another place if the folder refuses.

        Returns:
            The second of them; None where it could be written nowhere.
        """

        def write(folder: Path) -> None:
            for suffix, text in (("json", json.dumps(asdict(self), indent=1) + "\n"), ("txt", self.text())):
                replace_text(folder / f"{name}.{suffix}", text, 0o600)

        try:
            write(run_dir)
        except OSError:
            folder = refuge(run_dir.name, write)
            return None if folder is None else folder / f"{name}.txt"
        return run_dir / f"{name}.txt"


@dataclass(frozen=True)
class NodeLoss:
    """A node whose agent no longer answers; its workers are lost with it."""

    cause: Literal["node_silent", "agent_lost", "node_down"]
    hostname: str
    time: float
    """Seconds since the epoch when the loss was noticed."""
    ranks: tuple[int, ...] = ()


def read_report(run_dir: Path) -> FailureReport | None:
    """The report that a worker of this run has written of a hang; None where there is none."""
    try:
        found = json.loads((run_dir / "failure.json").read_text())
    except (OSError, ValueError):
        return None
    return FailureReport(**found | {"ranks": tuple(found["ranks"]), "workers": tuple(found["workers"])})


def describe_failure(run_dir: Path, loss: NodeLoss | None = None, restart: int | None = None) -> FailureReport | None:
    """Diagnose why a run failed, from the notes of its workers; None for a run without a failure.

    `restart`: of the start before which there had been so many; None: of the last one.

    A hang that a worker has found, and a lost node, take precedence over the errors they cause in other workers; an
    earlier error of a worker takes precedence over a lost node.
    """
    found = read_report(run_dir)
    if found is not None:
        return found
    endings = read_endings(run_dir, restart)
    root = root_cause(endings) if any(ending.failed for ending in endings) else None
    if loss is not None and (root is None or root.is_consequence or root.was_asked or root.time > loss.time):
        ranks = name_ranks(loss.ranks) if loss.ranks else "no workers yet"
        others = [line_of_ended(one) for one in endings if one.rank not in loss.ranks]
        return _report(
            loss.cause,
            {"ranks": ranks},
            ranks=loss.ranks,
            hostname=loss.hostname,
            step=min((one.step for one in endings if one.step is not None), default=None),
            noticed_at=loss.time,
            workers=(f"{ranks}: lost with node {loss.hostname}", *others),
        )
    return None if root is None else _of_ending(root, endings, run_dir)


def describe_hang(hang: Hang, states: Sequence[WorkerState], stacks: dict[int, str], now: float) -> FailureReport:
    """The report of a hang; `stacks` are those of the culprits, by rank."""
    first = next(state for state in states if state.rank == hang.culprits[0])
    waiting = name_ranks(hang.waiting) if hang.waiting else ""
    is_one = len(hang.waiting) == 1
    facts = {
        "who": who(first.rank, len(states), first.pid, first.hostname),
        "everybody": f"All {len(states)} workers" if len(hang.waiting) == len(states) else f"R{waiting[1:]}",
        "doing": first.doing,
        "seconds": hang.seconds,
        "hangs": "hangs" if len(hang.culprits) == 1 else f"and {name_ranks(hang.culprits[1:])} hang",
        "in_step": "" if first.step is None else f" in step {first.step + 1}",
        "waiting": waiting,
        "have": "has" if is_one else "have",
        "who_waits": f"; {waiting} {'waits' if is_one else 'wait'} for it" if waiting else "",
    }
    culprits = [state for state in states if state.rank in hang.culprits]
    others = [state for state in states if state.rank not in hang.culprits]
    return _report(
        hang.kind,
        facts,
        ranks=hang.culprits,
        hostname=first.hostname,
        pid=first.pid,
        step=first.step,
        noticed_at=now,
        evidence="\n".join(f"Stack of rank {rank}:\n{text}" for rank, text in stacks.items() if text),
        workers=tuple(line_of_running(state) for state in (*culprits, *others)),
    )


def describe_exception(
    failure: Failure, hostname: str, world_size: int, step: int | None, states: Sequence[WorkerState]
) -> FailureReport:
    """The report of an exception, by the worker that it ends."""
    return _report(
        "exception",
        {
            "who": who(failure.rank, world_size, failure.pid, hostname),
            "what": ": ".join(filter(None, (failure.type, one_line(failure.message)))),
        },
        ranks=(failure.rank,),
        hostname=hostname,
        pid=failure.pid,
        step=step,
        noticed_at=failure.time,
        evidence=failure.traceback,
        workers=tuple(line_of_running(state) for state in states),
    )


def describe_lost_peer(lost: WorkerState, states: Sequence[WorkerState], now: float) -> FailureReport:
    """The report on a worker that has ended without a note, by a worker that was waiting for it."""
    return _report(
        "peer_lost",
        {
            "who": who(lost.rank, len(states), lost.pid, lost.hostname),
            "in_step": "" if lost.step is None else f" in step {lost.step + 1}",
        },
        ranks=(lost.rank,),
        hostname=lost.hostname,
        pid=lost.pid,
        step=lost.step,
        noticed_at=now,
        workers=tuple(line_of_running(state) for state in states),
    )


def _of_ending(root: Ending, endings: Sequence[Ending], run_dir: Path) -> FailureReport:
    failure, facts = root.failure, {"who": who(root.rank, root.world_size, root.pid, root.hostname)}
    others = tuple(line_of_ended(one) for one in endings if one.rank != root.rank)
    fields: dict[str, Any] = {"evidence": "" if failure is None else failure.traceback}
    if failure is None:
        cause: Cause = "out_of_memory" if root.out_of_memory else "signal" if root.exit_code < 0 else "exit"
        fields["evidence"] = _tail(log_path(run_dir, root.rank))
    else:
        cause = "lost_touch" if root.is_consequence else "exception"
        facts["what"] = ": ".join(filter(None, (failure.type, one_line(failure.message))))
        if failure.is_user_error:
            fields |= {"is_user_error": True, "sentence": failure.message}
    return _report(
        cause,
        facts | {"peers": whereabouts(endings, root), "log": log_path(run_dir, root.rank)},
        ranks=(root.rank,),
        hostname=root.hostname,
        pid=root.pid,
        exit_code=root.exit_code,
        step=root.step,
        noticed_at=root.time,
        workers=(line_of_ended(root), *others),
        **fields,
    )


def _report(cause: Cause, facts: dict[str, Any], **values: Any) -> FailureReport:
    """The texts of a cause, filled in with `facts`; `values` are fields of the report."""
    fields = {"pid": None, "exit_code": None, "evidence": "", **values}
    exit_code = fields["exit_code"] or 0
    facts = {"node": fields["hostname"], "pid": fields["pid"], "exit_code": exit_code, **facts}
    sentence, advice = _TEXTS[cause]
    if cause == "exit" and exit_code == 128 + signal.SIGTERM:
        sentence = _BY_SIGTERM
    if cause == "signal":
        facts["signal"] = signal_name(-exit_code)
        advice = _ON_SIGNAL.get(exit_code, advice)
    told = {"sentence": sentence.format_map(facts), "next": advice.format_map(facts)}
    return FailureReport(cause=cause, **told | fields)


def who(rank: int, world_size: int, pid: int, hostname: str) -> str:
    return f"Rank {rank} of {world_size} (pid {pid} on {hostname})"


def line_of_running(state: WorkerState) -> str:
    step = "" if state.step is None else f"step {state.step}, "
    return f"rank {state.rank} (pid {state.pid} on {state.hostname}): {step}{state.doing}"


def line_of_ended(ending: Ending) -> str:
    step = "" if ending.step is None else f" after {number_of(ending.step, 'step')}"
    last = f"; its last collective was {ending.collective}" if ending.collective else ""
    code = "" if ending.exit_code >= 0 else f" by {signal_name(-ending.exit_code)}"
    code = f" with exit code {ending.exit_code}" if ending.exit_code > 0 else code
    return f"rank {ending.rank}: ended{step}{code}{last}"


def _tail(path: Path) -> str:
    """The last lines of a file, which may be one endless line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_TAIL_BYTES))
            text = file.read(MOST_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return "".join(deque(text.splitlines(keepends=True), maxlen=MOST_EVIDENCE_LINES))


def of_the_user(stacks: str) -> str:
    """Python's dump of all threads without Paceline's own threads, and without Python's own start."""
    ours = re.compile(r"paceline/(train/process/watch|comm/scheduler)\.py")
    threads = [thread for thread in stacks.split("\n\n") if not ours.search(thread)]
    return "\n".join(line for line in "\n\n".join(threads).splitlines() if not re.search(r"<frozen runpy>", line))
