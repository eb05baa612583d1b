"""Runs a plan: starts its workers on one node or several, watches them, and ensures that none outlives the run."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline import env
from paceline.errors import LaunchError, PacelineError, WorkerFailed, file_problems
from paceline.launch.commands import Rendezvous, WorkerCommand, rendezvous_on_one_node, worker_commands
from paceline.launch.endpoints import listen
from paceline.launch.failure_report import FailureReport, describe_failure, user_mistake
from paceline.launch.forking import LOAD_S, ForkServer
from paceline.launch.output import check_open_files
from paceline.launch.remote_team import ANSWER_TIMEOUT_S, RemoteTeam, arrange_rendezvous
from paceline.launch.supervise import Outcome, Supervisor
from paceline.launch.team import Events, LaunchOptions, LocalTeam, Signalled, Team
from paceline.regular_files import make_run_folder

if TYPE_CHECKING:
    from paceline.spec import Plan

SAVE_S = 30.0
"""Time for training to save a checkpoint on SIGTERM: what schedulers allow between SIGTERM and SIGKILL."""

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_workers(
    plan: Plan,
    program: Sequence[str],
    options: LaunchOptions,
    *,
    nodes: Sequence[RemoteTeam] = (),
    fork_server: ForkServer | None = None,
) -> None:
    """Run `program` in every worker of `plan` and return when all of them have ended without an error.

    `program` is what would follow `python` on a command line. On this node rank 0 writes to this process's own standard
    output and error, and the others to logs/rankK.log in the run folder.

    When a worker fails, hangs, or is lost with its node, or when this process gets SIGINT, SIGTERM or SIGHUP, every
    worker gets SIGTERM, and SIGKILL later; a second signal kills at once. What a worker started is killed when it has
    ended. SIGUSR1 is passed on: it asks training to save a checkpoint.
    Signals are handled only where this is called from the main thread, and the handlers found are put back.

    Args:
        nodes: the agents on the nodes that the plan names; where it names none the workers run here.
        fork_server: forks the workers on this node, so that they need not load torch each.

    Raises:
        LaunchError: a worker cannot be started, or the nodes do not reach each other.
        PacelineError: a worker met a mistake of the user; carries its sentence.
        WorkerFailed: a worker failed, hangs, or is lost; names the first one that did so on its own. The report is in
            failure.json and failure.txt in the run folder.
        KeyboardInterrupt: SIGINT came.
        SystemExit: SIGTERM or SIGHUP came; the code is 128 + the number of the signal.
    """
    prepare(options.run_dir)
    with catch_signals() as events:
        outcome = run_once(plan, program, nodes, options, events, fork_server=fork_server)
    raise_interruption(outcome.interrupted_by)
    mistake = user_mistake(outcome)
    if mistake is not None:
        raise PacelineError(mistake)
    report = describe_failure(outcome, plan.world_size, options.run_dir, answers=_still_answers(outcome, nodes))
    if report is not None:
        raise worker_failed(report, report.save(options.run_dir))


def run_once(
    plan: Plan,
    program: Sequence[str],
    nodes: Sequence[RemoteTeam],
    options: LaunchOptions,
    events: Events,
    *,
    fork_server: ForkServer | None,
    could_grow: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Start the workers of `plan` and watch them until the last one has ended.

    Args:
        events: brings the signals of `catch_signals`.
        fork_server: the fork server of this node; agents have their own.
        could_grow: whether there is a reason to end the run and start it with more workers.

    Raises:
        LaunchError: a worker cannot be started, or the nodes do not reach each other.
    """
    with contextlib.ExitStack() as at_end:

        def commands(rendezvous: Rendezvous) -> list[WorkerCommand]:
            return worker_commands(plan, program, options, rendezvous, launched_at=time.time())

        teams: Sequence[Team]
        if any(placement.hostname for placement in plan.nodes):
            teams = _start_on(_chosen(nodes, plan), commands, options, events, at_end)
        else:
            if options.output == "all":
                check_open_files(plan.world_size)  # before there is a command for each worker
            teams = [_start_here(fork_server, commands, options, events, at_end)]
        supervisor = Supervisor(teams, events, options, could_grow=could_grow)
        supervisor.wait()
        at_end.close()
        supervisor.drain()
    return supervisor.outcome


Commands = Callable[[Rendezvous], Sequence[WorkerCommand]]


def _start_here(
    fork_server: ForkServer | None,
    commands_for: Commands,
    options: LaunchOptions,
    events: Events,
    at_end: contextlib.ExitStack,
) -> LocalTeam:
    """Start the workers on this node; `at_end` releases what they need until its end."""
    folder = at_end.enter_context(tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True))
    with listen("127.0.0.1") as torch_store:  # rank 0 has inherited it
        commands = commands_for(rendezvous_on_one_node(Path(folder), torch_store.getsockname()))
        if fork_server is not None and not options.is_elastic:  # which prepares it beside the training
            fork_server.load(commands[0].variables, LOAD_S, is_interrupted=lambda: not events.empty())
        team = at_end.enter_context(contextlib.closing(LocalTeam(options, events.put, fork_server)))
        team.start(commands, sockets={env.TORCH_STORE_FD: torch_store.fileno()})
    return team


def _start_on(
    teams: Sequence[RemoteTeam],
    commands_for: Commands,
    options: LaunchOptions,
    events: Events,
    at_end: contextlib.ExitStack,
) -> Sequence[RemoteTeam]:
    """Start the workers on the nodes of these agents; `at_end` has them end."""
    rendezvous = arrange_rendezvous(teams, options.interface)
    commands = commands_for(rendezvous)
    marker = at_end.enter_context(_marker_in(options.run_dir))
    for number, team in enumerate(teams):
        at_end.callback(team.end_run)
        team.begin_run(
            [command for command in commands if command.node == number],
            options,
            events.put,
            marker=marker,
            port=rendezvous.port if number == 0 else None,
        )
    problems = []
    for team in teams:  # all of them, since an agent whose answer is not read may serve the next run
        try:
            team.await_start()
        except LaunchError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    return teams


def _chosen(nodes: Sequence[RemoteTeam], plan: Plan) -> list[RemoteTeam]:
    """The nodes that the plan names, in its order."""
    by_name = {node.hostname: node for node in nodes}
    unknown = [share.hostname for share in plan.nodes if share.hostname not in by_name]
    if unknown:
        raise LaunchError(f"The plan needs node {unknown[0]}, but this run was given {', '.join(by_name) or 'none'}.")
    return [by_name[share.hostname] for share in plan.nodes]


@contextlib.contextmanager
def _marker_in(run_dir: Path) -> Iterator[str]:
    """Create a temporary file in the run folder, by which other nodes recognise the folder; yields its name.

    Raises:
        LaunchError: it cannot be made.
    """
    with file_problems(f"The run folder {run_dir} cannot be written to", LaunchError):
        descriptor, name = tempfile.mkstemp(prefix=".seen-", dir=run_dir)
    os.close(descriptor)
    try:
        yield Path(name).name
    finally:
        with contextlib.suppress(OSError):  # somebody has deleted the folder, or its server is gone
            Path(name).unlink()


@contextlib.contextmanager
def catch_signals() -> Iterator[Events]:
    """While the block is open, signals do not end this process but are events; outside of the main thread, none come.

    A signal between two runs of the block waits for the next.
    """
    events: Events = queue.SimpleQueue()
    if threading.current_thread() is not threading.main_thread():
        yield events
        return

    def note(number: int, _frame: FrameType | None) -> None:
        events.put(Signalled(number))  # SimpleQueue.put may interrupt a get, and itself

    # Signals that the caller ignores (nohup, a shell's background job) stay ignored.
    wanted = (*_ENDINGS, signal.SIGUSR1)
    heeded = [number for number in wanted if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_wanted(events: Events) -> int | None:
    """Take the number of a signal that came between two runs and asks for the end; the next run does not get it."""
    while not events.empty():
        event = events.get()
        if isinstance(event, Signalled) and event.number in _ENDINGS:
            return event.number
    return None


def raise_interruption(number: int | None) -> None:
    """End like a process that was ended by this signal; does nothing without a signal."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


def _still_answers(outcome: Outcome, nodes: Sequence[RemoteTeam]) -> bool:
    """Whether a node whose agent ended still answers, so that only the agent ended."""
    lost = {loss.hostname for loss in outcome.losses if loss.silent_s is None}
    return any(node.access.succeeds(["true"], ANSWER_TIMEOUT_S) for node in nodes if node.hostname in lost)


def prepare(run_dir: Path) -> None:
    """Make the folders, readable only by the user, and delete files of an earlier run in the same folder."""
    with file_problems(f"The run folder {run_dir} cannot be used", LaunchError, "name another one with out = DIR"):
        for folder in (run_dir, run_dir / "logs", run_dir / "failures"):
            make_run_folder(folder)
        reports = "failure.json", "failure.txt", "failure-*.json", "failure-*.txt"
        for pattern in ("failures/rank*", "logs/rank*", *reports):
            for note in run_dir.glob(pattern):
                note.unlink()


def worker_failed(report: FailureReport, file: Path | None, more: str = "") -> WorkerFailed:
    """The error of a run that failed as the report in `file` describes; `more` is another sentence for the user."""
    code = report.exit_code
    stop = "" if not more or report.sentence.endswith((".", "!", "?")) else "."
    return WorkerFailed(
        f"{report.sentence}{stop} {more}".rstrip(),
        rank=report.ranks[0],
        details=report.evidence,
        exit_code=1 if code is None else code if code > 0 else 128 - code,
        report=file,
    )
