"""Running a plan: start its workers on this node or on several, watch them, and let none of them outlive the run."""

from __future__ import annotations

import contextlib
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.errors import LaunchError, PacelineError, WorkerFailed
from paceline.launch.commands import WorkerCommand, meeting_on_one_node, worker_commands
from paceline.launch.events import Events, Signalled
from paceline.launch.remote import RemoteTeam, arrange_meeting
from paceline.launch.report import FailureReport, clear_report, describe_failure, user_mistake
from paceline.launch.supervise import Outcome, Supervisor
from paceline.launch.team import LocalTeam, Orders, Output, Team

if TYPE_CHECKING:
    from paceline.spec import Plan

HANG_TIMEOUT_S = 60.0


def run_workers(
    plan: Plan,
    program: Sequence[str],
    *,
    run_dir: Path,
    nodes: Sequence[RemoteTeam] = (),
    interface: str | None = None,
    output: Output = "rank0",
    grace_s: float = 3.0,
    hang_timeout_s: float = HANG_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run `program` in every worker of `plan` and return when all of them have ended without an error.

    `program` is what would follow `python` on a command line. On this node rank 0 writes to this process's own standard
    output and error; the others write to `run_dir`/logs/rankK.log and, with `output="all"`, here as well, each line
    with its rank in front. `environ` holds variables for the workers over those of their node.

    When a worker fails, hangs, or is lost with its node, or when this process gets SIGINT, SIGTERM or SIGHUP, every
    worker and everything it started gets SIGTERM, and SIGKILL `grace_s` seconds later; a second signal kills at once.
    Signals are handled only where this is called from the main thread, and the handlers found are put back.

    Args:
        nodes: the agents on the nodes that the plan names; where it names none the workers run here.
        interface: the network interface between nodes; None: one on which all nodes reach the first.
        hang_timeout_s: how long workers may wait for another one, or a node be silent, before the run is ended.

    Raises:
        LaunchError: a worker cannot be started, or the nodes do not reach each other.
        PacelineError: a worker met a mistake of the user; carries its sentence.
        WorkerFailed: a worker ended before its work did, hangs, or is lost; names the first one that did so of its own
            accord. The report is in `run_dir`/failure.json and failure.txt.
        KeyboardInterrupt: SIGINT came.
        SystemExit: SIGTERM or SIGHUP came; the code is 128 + its number.
    """
    _prepare(run_dir)
    events: Events = queue.SimpleQueue()
    orders = Orders(run_dir, output, hang_timeout_s, events.put)
    launched_at = time.time()
    remote = _chosen(nodes, plan) if any(share.hostname for share in plan.nodes) else []
    with contextlib.ExitStack() as at_end:
        if remote:
            meeting = arrange_meeting(remote, interface)
        else:
            folder = tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True)
            meeting = meeting_on_one_node(Path(at_end.enter_context(folder)))
        commands = worker_commands(
            plan, program, run_dir=run_dir, meeting=meeting, launched_at=launched_at, environ=environ
        )
        at_end.enter_context(_signals_to(events))
        teams: Sequence[Team]
        if remote:
            teams = _start_on(remote, commands, orders, meeting.port, at_end)
        else:
            teams = [_start_here(commands, orders, at_end)]
        supervisor = Supervisor(teams, events, grace_s=grace_s, hang_timeout_s=hang_timeout_s)
        outcome = supervisor.wait()
        at_end.close()
        supervisor.drain()
    interrupted_by = supervisor.outcome().interrupted_by
    if interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if interrupted_by is not None:
        raise SystemExit(128 + interrupted_by)
    lost = {loss.hostname for loss in outcome.losses if loss.silent_s is None}
    answers = any(node.answers() for node in nodes if node.hostname in lost)
    _raise_failure(outcome, plan.world_size, run_dir, answers)


def _chosen(nodes: Sequence[RemoteTeam], plan: Plan) -> list[RemoteTeam]:
    """The nodes that the plan names, in its order."""
    by_name = {node.hostname: node for node in nodes}
    unknown = [share.hostname for share in plan.nodes if share.hostname not in by_name]
    if unknown:
        raise LaunchError(f"The plan wants node {unknown[0]}, but this run was given {', '.join(by_name) or 'none'}.")
    return [by_name[share.hostname] for share in plan.nodes]


def _start_here(commands: Sequence[WorkerCommand], orders: Orders, at_end: contextlib.ExitStack) -> LocalTeam:
    team = at_end.enter_context(contextlib.closing(LocalTeam(0, orders)))
    team.start(commands)
    return team


def _start_on(
    teams: Sequence[RemoteTeam],
    commands: Sequence[WorkerCommand],
    orders: Orders,
    port: int | None,
    at_end: contextlib.ExitStack,
) -> Sequence[RemoteTeam]:
    marker = at_end.enter_context(_marker_in(orders.run_dir))
    for number, team in enumerate(teams):
        at_end.callback(team.end_run)
        mine = [command for command in commands if command.node == number]
        team.begin_run(number, mine, orders, marker=marker, port=port if number == 0 else None)
    return teams


@contextlib.contextmanager
def _marker_in(run_dir: Path) -> Iterator[str]:
    """The name of a file that whoever sees the run folder sees."""
    with tempfile.NamedTemporaryFile(prefix=".seen-", dir=run_dir) as file:
        yield Path(file.name).name


@contextlib.contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """While open, signals that ask this process to end are put into `events` instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _frame: FrameType | None) -> None:
        events.put(Signalled(number))  # SimpleQueue.put may interrupt a get, and itself

    endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What the caller ignores (nohup, a shell's background job) stays ignored.
    heeded = [number for number in endings if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(run_dir: Path) -> None:
    """Make the folders, readable by the user alone, and clear what an earlier run in the same folder left."""
    try:
        for folder in (run_dir, run_dir / "logs", run_dir / "failures"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for note in (*run_dir.glob("failures/rank*"), *run_dir.glob("logs/rank*")):
            note.unlink()
        clear_report(run_dir)
    except OSError as error:
        raise LaunchError(f"The run folder {run_dir} cannot be used: {error}.") from error


def _raise_failure(outcome: Outcome, world_size: int, run_dir: Path, answers: bool) -> None:
    """Tell the user about a run in which at least one worker failed; nothing where all went well."""
    mistake = user_mistake(outcome)
    if mistake is not None:
        raise PacelineError(mistake)
    report = describe_failure(outcome, world_size, run_dir, answers=answers)
    if report is None:
        return
    report.save(run_dir)
    raise WorkerFailed(
        report.sentence,
        rank=report.ranks[0],
        details=report.evidence,
        exit_code=_exit_code(report),
        report=run_dir / "failure.txt",
    )


def _exit_code(report: FailureReport) -> int:
    if report.exit_code is None:
        return 1
    return report.exit_code if report.exit_code > 0 else 128 - report.exit_code
