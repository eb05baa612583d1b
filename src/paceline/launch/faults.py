"""The table of faults of a run: the cause that failure.json names, the message, and what to do next."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from paceline.spec.plan import EXCLUDED

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

ENDED_BY_SIGTERM = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Fault:
    """One row of the table; texts have their facts in braces."""

    sentence: str
    """The summary of the failure report: which worker, and what happened."""
    short: str
    """The phrase in the line that an elastic run prints before it restarts."""
    next: str
    """What to try."""
    blames_workers: bool = True
    """Whether the devices of these workers may be the cause."""


_READ_LOG = "Read the last lines of the worker's log, {log}."
_CRASHED = "Read where Python was, {stack}; a crash in native code is often a mismatch of versions: `paceline doctor`."

FAULTS: dict[tuple[Cause, int | None], Fault] = {
    ("exception", None): Fault(
        "{who} failed with {what}",
        "{workers} raised an error ({last_line})",
        "Read the traceback; `paceline launch --launcher debug …` runs the program in one process, under a debugger if "
        "you like.",
    ),
    ("exit", None): Fault(
        "{who} ended with exit code {exit_code}.", "{workers} left with exit code {exit_code}", _READ_LOG
    ),
    ("exit", EXCLUDED): Fault(
        "{who} ended with exit code {exit_code}.", "{workers} left, for it held the others up,", _READ_LOG
    ),
    ("exit", ENDED_BY_SIGTERM): Fault(
        "{who} was ended by SIGTERM from outside this run (exit code {exit_code}).",
        "{workers} left with exit code {exit_code}",
        _READ_LOG,
        blames_workers=False,
    ),
    ("signal", -signal.SIGKILL): Fault(
        "{who} was killed by SIGKILL from outside this run: most likely the machine ran out of memory; try "
        "more virtual_shards, each of fewer samples, or fewer workers.",
        "{workers} was killed",
        _CRASHED,
    ),
    ("signal", -signal.SIGABRT): Fault(
        "{who} was killed by SIGABRT.",
        "{workers} crashed (SIGABRT)",
        "Compare what the workers were in: where some are in another collective than others, because only some ranks "
        "run code that is a collective, the backend ends the process. Else read where Python was, {stack}; a crash in "
        "native code is often a mismatch of versions: `paceline doctor`.",
    ),
    ("signal", None): Fault("{who} was killed by {signal}.", "{workers} crashed ({signal})", _CRASHED),
    ("out_of_memory", None): Fault(
        "{who} was killed by the kernel: out of memory; try more virtual_shards, each of fewer samples, fewer workers "
        "a node, or a higher memory limit.",
        "{workers} ran out of memory",
        "Try more virtual_shards, each of fewer samples, fewer workers a node, or a higher memory limit.",
    ),
    ("lost_touch", None): Fault(
        "{who} lost touch with the other workers{peers}: {what}",
        "{workers} lost touch with the others",
        "Look at the network between the nodes: `paceline doctor --hosts …`.",
        blames_workers=False,
    ),
    ("hung", None): Fault(
        "{who} {hangs}{in_step}: {waiting} {have} waited for it for {seconds:.1f} s.",
        "{workers} hung",
        "Look at the stack: a loop, a lock, a slow read, or code that only some ranks run before a collective; "
        "raise the hang timeout if that work is meant to take so long.",
    ),
    ("stopped", None): Fault(
        "{who} has been stopped for {seconds:.1f} s (SIGSTOP){who_waits}.",
        "{workers} {was} stopped",
        "Somebody stopped the process (kill -STOP, Ctrl-Z, a debugger); kill -CONT {pid} lets one go on.",
    ),
    ("mismatch", None): Fault(
        "{everybody} have waited for each other for {seconds:.1f} s: {doing}.",
        "the workers waited for each other",
        "Compare the collectives: ranks in different ones took different branches, as by `if run.rank == 0: "
        "run.evaluate(…)` (debug_comm names the first difference); in the same one, data does not get through: "
        "`paceline doctor --hosts …`.",
        blames_workers=False,
    ),
    ("node_silent", None): Fault(
        "Node {node} ({ranks}) has been silent for {seconds:.1f} s: it lost power, hangs, or its link is cut.",
        "node {node} was lost",
        "Is {node} powered on and its link up? `ping {node}`; then start the run again, with this node or without.",
        blames_workers=False,
    ),
    ("agent_lost", None): Fault(
        "The agent on node {node} was killed or ended; its workers ({ranks}) went with it.",
        "node {node} was lost",
        "Somebody or something ended the agent; see the system's log on {node} (out of memory, a job limit).",
        blames_workers=False,
    ),
    ("node_down", None): Fault(
        "Node {node} ({ranks}) went down: its connection was closed{silence}.",
        "node {node} was lost",
        "Is {node} up? `ping {node}`; then start the run again, with this node or without.",
        blames_workers=False,
    ),
}
"""By cause, and by exit code where a row is for one alone."""


def fault_of(cause: Cause, exit_code: int | None) -> Fault:
    """The row of the table for a report: that of the exit code (negative: a signal), if it has one, else of all."""
    return FAULTS.get((cause, exit_code)) or FAULTS[cause, None]
