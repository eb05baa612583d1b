"""The one-screen failure report: which worker, where, why, what the others did, what to try next."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.launch.failures import (
    Ending,
    Failure,
    log_path,
    one_line,
    root_cause,
    signal_name,
    stack_path,
    whereabouts,
)
from paceline.launch.faults import Cause, fault_of
from paceline.launch.hang import Hang, WorkerState
from paceline.launch.supervise import NodeLoss, Outcome
from paceline.regular_files import refuge, replace_text
from paceline.words import name_ranks, number_of

LOG_TAIL_LINES = 30
MOST_STACK_LINES = 25
MOST_TAIL_BYTES = 64 << 10
"""How much of a worker's output or stack a report holds."""
MOST_WORKER_LINES = 12


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
            lines += ["", "Evidence:", *self.evidence.rstrip().splitlines()[-MOST_STACK_LINES:]]
        return "\n".join(lines) + "\n"

    def save(self, run_dir: Path, name: str = "failure") -> Path | None:
        """Write `name`.json and `name`.txt, readable only by the user; in another place if the folder refuses.

        Returns:
            The second of them; None where it could be written nowhere.
        """
        try:
            self._write(run_dir, name)
        except OSError:
            folder = refuge(run_dir.name, lambda place: self._write(place, name))
        else:
            folder = run_dir
        return None if folder is None else folder / f"{name}.txt"

    def _write(self, folder: Path, name: str) -> None:
        for suffix, text in (("json", json.dumps(asdict(self), indent=1) + "\n"), ("txt", self.text())):
            replace_text(folder / f"{name}.{suffix}", text, 0o600)


def cause_of(outcome: Outcome) -> NodeLoss | Hang | Ending | None:
    """What made a run fail; None for a run without a failure.

    A lost node and a hang take precedence over the errors they cause in other workers, and an earlier error of a worker
    takes precedence over both.
    """
    has_failed = any(ending.failed for ending in outcome.endings)
    root = root_cause(outcome.endings, stopped_at=outcome.stopped_at) if has_failed else None
    on_its_own_at = float("inf") if root is None or root.is_consequence else root.time
    loss = next((loss for loss in outcome.losses if loss.ranks and not loss.was_stopping), None)
    if loss is not None and loss.time <= on_its_own_at:
        return loss
    if outcome.hang is not None and outcome.hang_at <= on_its_own_at:
        return outcome.hang
    return root


def user_mistake(outcome: Outcome) -> str | None:
    """The message of the `PacelineError` that ended a worker, if a user's mistake ended the run."""
    match cause_of(outcome):
        case Ending(failure=Failure(is_user_error=True) as failure, is_consequence=False):
            return failure.message
    return None


def describe_failure(
    outcome: Outcome, world_size: int, run_dir: Path, *, answers: bool | None = None
) -> FailureReport | None:
    """Diagnose why a run failed; None for a run without a failure.

    `answers` says whether a lost node still answers; None: not checked.
    """
    match cause_of(outcome):
        case NodeLoss() as loss:
            return _of_loss(loss, outcome, answers)
        case Hang() as hang:
            return _of_hang(hang, outcome, world_size)
        case Ending() as root:
            return _of_ending(root, outcome, world_size, run_dir)
    return None


def _of_loss(loss: NodeLoss, outcome: Outcome, answers: bool | None) -> FailureReport:
    cause: Cause = "node_silent" if loss.silent_s is not None else "agent_lost" if answers else "node_down"
    ranks = name_ranks(loss.ranks)
    reports: tuple[WorkerState | Ending, ...] = (*outcome.states, *outcome.endings)
    steps = [one.step for one in reports if one.step is not None and one.rank not in loss.ranks]
    silence = "" if answers is None else " and it does not answer any more"
    return _report(
        cause,
        {"ranks": ranks, "seconds": loss.silent_s, "silence": silence},
        ranks=loss.ranks,
        hostname=loss.hostname,
        step=min(steps, default=None),
        noticed_at=loss.time,
        workers=(f"{ranks}: lost with node {loss.hostname}", *_worker_lines(outcome, besides=loss.ranks)),
    )


def _of_hang(hang: Hang, outcome: Outcome, world_size: int) -> FailureReport:
    first = next(state for state in outcome.states if state.rank == hang.culprits[0])
    culprits = [_line_of_running(state) for state in outcome.states if state.rank in hang.culprits]
    waiting = name_ranks(hang.waiting) if hang.waiting else ""
    is_one = len(hang.waiting) == 1
    facts = {
        "who": _who(first.rank, first.pid, first.hostname, world_size),
        "everybody": f"All {world_size} workers" if len(hang.waiting) == world_size else f"R{waiting[1:]}",
        "doing": first.doing,
        "seconds": hang.seconds,
        "hangs": "hangs" if len(hang.culprits) == 1 else f"and {name_ranks(hang.culprits[1:])} hang",
        "in_step": "" if first.step is None else f" in step {first.step + 1}",
        "waiting": waiting,
        "have": "has" if is_one else "have",
        "who_waits": f"; {waiting} {'waits' if is_one else 'wait'} for it" if waiting else "",
    }
    return _report(
        hang.kind,
        facts,
        ranks=hang.culprits,
        hostname=first.hostname,
        pid=first.pid,
        step=first.step,
        noticed_at=outcome.hang_at,
        evidence="\n".join(f"Stack of rank {rank}:\n{_of_the_user(text)}" for rank, text in outcome.stacks if text),
        workers=(*culprits, *_worker_lines(outcome, besides=hang.culprits)),
    )


def _of_the_user(stacks: str) -> str:
    """Python's dump of all threads without the frames of Paceline."""
    threads = [thread for thread in stacks.split("\n\n") if "paceline/launch/heartbeats.py" not in thread]
    lines = (line for thread in threads for line in thread.splitlines())
    return "\n".join(
        line for line in lines if not re.search(r"paceline/launch/(worker|fork_server)\.py|<frozen runpy>", line)
    )


def _of_ending(root: Ending, outcome: Outcome, world_size: int, run_dir: Path) -> FailureReport:
    cause: Cause = "signal" if root.exit_code < 0 else "exit"
    what = ""
    if root.failure is not None:
        cause = "lost_touch" if root.is_consequence else "exception"
        what = ": ".join(filter(None, (root.failure.type, one_line(root.failure.message))))
    elif root.out_of_memory:
        cause = "out_of_memory"
    facts = {
        "who": _who(root.rank, root.pid, root.hostname, world_size),
        "what": what,
        "peers": whereabouts(outcome.endings, outcome.stopped_at),
        "log": log_path(run_dir, root.rank),
        "stack": stack_path(run_dir, root.rank),
    }
    return _report(
        cause,
        facts,
        ranks=(root.rank,),
        hostname=root.hostname,
        pid=root.pid,
        exit_code=root.exit_code,
        step=root.step,
        noticed_at=min(outcome.stopped_at, max(ending.time for ending in outcome.endings)),
        evidence=_evidence(root, run_dir),
        workers=(_line_of_ended(root), *_worker_lines(outcome, besides=(root.rank,))),
    )


def _report(cause: Cause, facts: dict[str, Any], *, hostname: str, **values: Any) -> FailureReport:
    """The texts of the fault table, filled in with `facts`; `values` are fields of the report."""
    fields = {"pid": None, "exit_code": None, "evidence": "", **values}
    facts = {"node": hostname, "pid": fields["pid"], **_exit_facts(fields["exit_code"]), **facts}
    fault = fault_of(cause, fields["exit_code"])
    sentence, advice = fault.sentence.format_map(facts), fault.next.format_map(facts)
    return FailureReport(cause=cause, sentence=sentence, hostname=hostname, next=advice, **fields)


def in_short(report: FailureReport, step: int | None) -> str:
    """The failure as a line for the terminal: "worker 2 on node1 was killed at step 512"; None: no step is known."""
    are_many = len(report.ranks) > 1
    where = f" on {report.hostname}" if report.hostname else ""
    facts = {
        "workers": f"worker{'s' * are_many} {', '.join(map(str, report.ranks))}{where}",
        "was": "were" if are_many else "was",
        "node": report.hostname,
        "last_line": report.evidence.rstrip().splitlines()[-1] if report.evidence else "?",
        **_exit_facts(report.exit_code),
    }
    what = fault_of(report.cause, report.exit_code).short.format_map(facts)
    return what if step is None else f"{what} at step {step}" if step else f"{what} before the first step"


def _exit_facts(exit_code: int | None) -> dict[str, Any]:
    return {"exit_code": exit_code, "signal": signal_name(-(exit_code or 0))}


def _who(rank: int, pid: int, hostname: str, world_size: int) -> str:
    return f"Rank {rank} of {world_size} (pid {pid}{f' on {hostname}' if hostname else ''})"


def _worker_lines(outcome: Outcome, *, besides: Sequence[int]) -> list[str]:
    """What each worker was doing when the failure was noticed, or how it ended, by rank."""
    lines = {ending.rank: _line_of_ended(ending) for ending in outcome.endings}
    lines |= {state.rank: _line_of_running(state) for state in outcome.states}
    return [lines[rank] for rank in sorted(lines) if rank not in besides]


def _line_of_running(state: WorkerState) -> str:
    step = "" if state.step is None else f"step {state.step}, "
    return f"rank {state.rank} (pid {state.pid}): {step}{state.doing}"


def _line_of_ended(ending: Ending) -> str:
    step = "" if ending.step is None else f" after {number_of(ending.step, 'step')}"
    last = f"; its last collective was {ending.collective}" if ending.collective else ""
    return f"rank {ending.rank}: ended{step}{last}"


def _evidence(ending: Ending, run_dir: Path) -> str:
    """A failed worker's traceback, else its stack at a crash and its last lines of output; may be empty."""
    if ending.failure is not None:
        return ending.failure.traceback
    crash = _tail(stack_path(run_dir, ending.rank), None) if ending.exit_code < 0 else ""
    return crash + _tail(log_path(run_dir, ending.rank), LOG_TAIL_LINES)


def _tail(path: Path, num_lines: int | None) -> str:
    """The last lines of a file, which may be one endless line."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_TAIL_BYTES))
            text = (file.read(MOST_TAIL_BYTES) or b"").decode("utf-8", "replace")
    except OSError:
        return ""  # rank 0 of a local run has no log: it wrote to the terminal
    return "".join(deque(text.splitlines(keepends=True), maxlen=num_lines))
