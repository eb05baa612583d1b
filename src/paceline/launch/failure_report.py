"""The one-screen failure report: who, where, why, what the others did, what to try next."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from paceline.launch.failures import (
    Ending,
    Failure,
    is_consequence,
    log_path,
    name_ranks,
    root_cause,
    sentence,
    stack_path,
)
from paceline.launch.hang import Hang, WorkerState
from paceline.launch.supervise import NodeLoss, Outcome

Cause = Literal[
    "exception",
    "exit",
    "signal",
    "out_of_memory",
    "lost_touch",
    "hung",
    "stopped",
    "mismatch",
    "node_silent",
    "agent_lost",
    "node_down",
]

LOG_TAIL_LINES = 30
MOST_STACK_LINES = 25
MOST_WORKER_LINES = 12

_NEXT = {
    "exception": "Read the traceback; `paceline launch --launcher debug …` runs the program in one process, under a "
    "debugger if you like.",
    "exit": "Read the last lines of the worker's log, {log}.",
    "signal": "Read where Python was, {stack}; a crash in native code is often a mismatch of versions: "
    "`paceline doctor`.",
    "out_of_memory": "Try --micro-batch-size with half the samples, fewer workers a node, or a higher memory limit.",
    "lost_touch": "Look at the network between the nodes: `paceline doctor --hosts …`.",
    "hung": "Look at the stack: a loop, a lock, a slow read, or code that only some ranks run before a collective; "
    "--hang-timeout raises the bound if that work is meant to take so long.",
    "stopped": "Somebody stopped the process (kill -STOP, Ctrl-Z, a debugger); kill -CONT {pid} lets one go on.",
    "mismatch": "Compare the collectives: ranks in different ones took different branches (--debug-comm names the "
    "first difference); in the same one, data does not get through: `paceline doctor --hosts …`.",
    "node_silent": "Is {node} powered on and its link up? `ping {node}`; then start the run again: --hosts without it "
    "works too.",
    "agent_lost": "Somebody or something ended the agent; see the system's log on {node} (out of memory, a job limit).",
    "node_down": "Is {node} up? `ping {node}`; then start the run again: --hosts without it works too.",
}


@dataclass(frozen=True)
class FailureReport:
    """Why a run failed; failure.json and failure.txt in the run folder hold it."""

    cause: Cause
    sentence: str
    """Who and what."""
    ranks: tuple[int, ...]
    """The ranks to blame."""
    hostname: str
    pid: int | None
    exit_code: int | None
    """As in subprocess: negative for a signal; None: it did not end by itself."""
    step: int | None
    """Optimizer updates done by then."""
    noticed_at: float
    """Seconds since the epoch."""
    next: str
    """What to try."""
    evidence: str
    """A traceback, the stacks of those that hang, or the last lines of a log; may be empty."""
    workers: tuple[str, ...]
    """What every worker was doing, a line each."""

    def text(self) -> str:
        """One screen for a person."""
        lines = [self.sentence, ""]
        if self.step is not None:
            lines.append(f"After     {self.step} step{'s' if self.step != 1 else ''}")
        lines.append(f"Next      {self.next}")
        if self.workers:
            shown = self.workers[:MOST_WORKER_LINES]
            lines += ["", "The workers when it was noticed:", *(f"  {line}" for line in shown)]
            if len(self.workers) > len(shown):
                lines.append(f"  … and {len(self.workers) - len(shown)} more, in failure.json")
        if self.evidence:
            lines += ["", "Evidence:", *self.evidence.rstrip().splitlines()[-MOST_STACK_LINES:]]
        return "\n".join(lines) + "\n"

    def save(self, run_dir: Path, name: str = "failure") -> None:
        """Write `name`.json and `name`.txt, readable by the user alone."""
        for suffix, text in (("json", json.dumps(asdict(self), indent=1) + "\n"), ("txt", self.text())):
            descriptor = os.open(run_dir / f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)


def clear_report(run_dir: Path) -> None:
    """Take away the reports of an earlier run in the same folder."""
    for pattern in ("failure.json", "failure.txt", "failure-*.json", "failure-*.txt"):
        for path in run_dir.glob(pattern):
            path.unlink()


def user_mistake(outcome: Outcome) -> str | None:
    """The sentence of a worker that met a mistake of the user, if that is what ended the run."""
    if _first_loss(outcome) is not None or not _failed(outcome):
        return None
    root = root_cause(outcome.endings, stopped_at=outcome.stopped_at)
    if outcome.hang is not None and not _came_first(root, outcome.hang_at):
        return None
    failure = root.failure
    if failure is not None and failure.is_user_error and not is_consequence(failure):
        return failure.message
    return None


def describe_failure(
    outcome: Outcome, world_size: int, run_dir: Path, *, answers: bool | None = None
) -> FailureReport | None:
    """What went wrong in a run; None for one that went well.

    A node's loss and a hang come before what their victims say; an error of a worker's own that came first, before
    them. `answers` tells whether a lost node still answers; None: nobody has asked it.
    """
    root = root_cause(outcome.endings, stopped_at=outcome.stopped_at) if _failed(outcome) else None
    loss = _first_loss(outcome)
    if loss is not None and not (root and _came_first(root, loss.time)):
        return _of_loss(loss, outcome, answers)
    if outcome.hang is not None and not (root and _came_first(root, outcome.hang_at)):
        return _of_hang(outcome.hang, outcome, world_size)
    return None if root is None else _of_ending(root, outcome, world_size, run_dir)


def _failed(outcome: Outcome) -> bool:
    return any(ending.failed for ending in outcome.endings)


def _first_loss(outcome: Outcome) -> NodeLoss | None:
    return next((loss for loss in outcome.losses if loss.ranks and not loss.was_stopping), None)


def _came_first(ending: Ending, time: float) -> bool:
    """Whether the worker failed of its own accord before that time."""
    return ending.time < time and not (ending.failure is not None and is_consequence(ending.failure))


def _of_loss(loss: NodeLoss, outcome: Outcome, answers: bool | None) -> FailureReport:
    ranks = name_ranks(loss.ranks)
    if loss.silent_s is not None:
        cause: Cause = "node_silent"
        what = (
            f"Node {loss.hostname} ({ranks}) has been silent for {loss.silent_s:.1f} s: it lost power, hangs, or its "
            "link is cut."
        )
    elif answers:
        cause = "agent_lost"
        what = f"The agent on node {loss.hostname} was killed or ended; its workers ({ranks}) went with it."
    else:
        cause = "node_down"
        silence = "" if answers is None else " and it does not answer any more"
        what = f"Node {loss.hostname} ({ranks}) went down: its connection was closed{silence}."
    steps = [state.step for state in outcome.states if state.step is not None]
    return FailureReport(
        cause=cause,
        sentence=what,
        ranks=loss.ranks,
        hostname=loss.hostname,
        pid=None,
        exit_code=None,
        step=min(steps, default=None),
        noticed_at=loss.time,
        next=_NEXT[cause].format(node=loss.hostname),
        evidence="",
        workers=(f"{ranks}: lost with node {loss.hostname}", *_lines(outcome.states)),
    )


def _of_hang(hang: Hang, outcome: Outcome, world_size: int) -> FailureReport:
    by_rank = {state.rank: state for state in outcome.states}
    first = by_rank[hang.culprits[0]]
    names = {ending.rank: ending.hostname for ending in outcome.endings}
    hostname = names.get(first.rank, "")
    where = f"pid {first.pid}{f' on {hostname}' if hostname else ''}"
    waiting = (
        f"; {name_ranks(hang.waiting)} {'waits' if len(hang.waiting) == 1 else 'wait'} for it" if hang.waiting else ""
    )
    if hang.kind == "mismatch":
        who = f"All {world_size} workers" if len(hang.waiting) == world_size else f"R{name_ranks(hang.waiting)[1:]}"
        what = f"{who} have waited for each other for {hang.seconds:.1f} s: {first.doing}."
    elif hang.kind == "stopped":
        what = (
            f"Rank {first.rank} of {world_size} ({where}) has been stopped for {hang.seconds:.1f} s (SIGSTOP){waiting}."
        )
    else:
        step = "" if first.step is None else f" in step {first.step + 1}"
        hangs = "hangs" if len(hang.culprits) == 1 else f"and {name_ranks(hang.culprits[1:])} hang"
        what = (
            f"Rank {first.rank} of {world_size} ({where}) {hangs}{step}: {name_ranks(hang.waiting)} "
            f"{'has' if len(hang.waiting) == 1 else 'have'} waited for it for {hang.seconds:.1f} s."
        )
    stacks = "\n".join(f"Stack of rank {rank}:\n{_of_the_user(text)}" for rank, text in outcome.stacks if text)
    return FailureReport(
        cause=hang.kind,
        sentence=what,
        ranks=hang.culprits,
        hostname=hostname,
        pid=first.pid,
        exit_code=None,
        step=first.step,
        noticed_at=outcome.hang_at,
        next=_NEXT[hang.kind].format(pid=first.pid),
        evidence=stacks,
        workers=_lines(sorted(outcome.states, key=lambda state: state.rank not in hang.culprits)),
    )


def _of_the_user(stacks: str) -> str:
    """Python's dump of all threads without what Paceline itself puts around a program."""
    threads = [thread for thread in stacks.split("\n\n") if "paceline/launch/heartbeats.py" not in thread]
    lines = (line for thread in threads for line in thread.splitlines())
    return "\n".join(
        line for line in lines if not re.search(r"paceline/launch/(worker|fork_server)\.py|<frozen runpy>", line)
    )


def _of_ending(root: Ending, outcome: Outcome, world_size: int, run_dir: Path) -> FailureReport:
    cause: Cause = "exit"
    if root.failure is not None:
        cause = "lost_touch" if is_consequence(root.failure) else "exception"
    elif root.out_of_memory:
        cause = "out_of_memory"
    elif root.exit_code < 0:
        cause = "signal"
    log, stack = log_path(run_dir, root.rank), stack_path(run_dir, root.rank)
    last = f"; its last collective was {root.collective}" if root.collective else ""
    step = "" if root.step is None else f" after {root.step} step{'s' * (root.step != 1)}"
    return FailureReport(
        cause=cause,
        sentence=sentence(root, outcome.endings, world_size=world_size, stopped_at=outcome.stopped_at),
        ranks=(root.rank,),
        hostname=root.hostname,
        pid=root.pid,
        exit_code=root.exit_code,
        step=root.step,
        noticed_at=min(outcome.stopped_at, max(ending.time for ending in outcome.endings)),
        next=_NEXT[cause].format(log=log, stack=stack, node=root.hostname or "this machine", pid=root.pid),
        evidence=_evidence(root, run_dir),
        workers=(f"rank {root.rank}: ended{step}{last}", *_lines(outcome.states)),
    )


def _lines(states: Sequence[WorkerState]) -> tuple[str, ...]:
    return tuple(
        f"rank {state.rank} (pid {state.pid}): {'' if state.step is None else f'step {state.step}, '}{state.doing}"
        for state in states
    )


def _evidence(ending: Ending, run_dir: Path) -> str:
    """A failed worker's traceback, else where a crash found it and its last lines; may be empty."""
    failure: Failure | None = ending.failure
    if failure is not None:
        return failure.traceback
    crash = _tail(stack_path(run_dir, ending.rank), None) if ending.exit_code < 0 else ""
    return crash + _tail(log_path(run_dir, ending.rank), LOG_TAIL_LINES)


def _tail(path: Path, num_lines: int | None) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, maxlen=num_lines))
    except OSError:
        return ""  # rank 0 of a local run has no log: it wrote to the terminal
