"""Runs a plan: starts torch's agent on every node, watches the agents, and tells why a run failed."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from paceline import env
from paceline.diagnosis.failures import read_beginnings
from paceline.diagnosis.report import NodeLoss, describe_failure
from paceline.errors import LaunchError, PacelineError, WorkerFailed, file_problems, reason_of
from paceline.regular_files import make_run_folder

if TYPE_CHECKING:
    from paceline.spec import Plan

SAVE_S = 30.0
"""Time for workers to save a checkpoint when they are asked to end: what torch's agent allows, too."""
GRACE_S = 5.0
"""How much longer an agent may take to end than its workers."""
ANSWER_S = 15.0

Output = Literal["rank0", "all"]
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class LaunchOptions:
    """Settings of all workers of a run, on all nodes."""

    run_dir: Path
    output: Output = "rank0"
    """Whose lines are shown: those of rank 0, or all, each with its rank in front; logs have everybody's."""
    interface: str | None = None
    """The network interface between nodes; None: on every node the one that leads to the first."""
    hang_timeout_s: float | None = None
    """How long workers of a `Run` may wait for another one; None: `diagnosis.hang.HANG_TIMEOUT_S`."""
    max_restarts: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers over those of their node."""
    torchrun: tuple[str, ...] = ()
    """Further arguments of torchrun."""


@dataclass(frozen=True)
class Reach:
    """How to start a program on some nodes at once: by a local process with the program's standard streams."""

    hostnames: tuple[str, ...] = ()
    """Empty: this node."""
    argv: Callable[[Sequence[str], Mapping[str, str]], Sequence[str]] = lambda program, _environ: program
    """(program, environment variables that it needs there) -> the local command line."""
    explain: Callable[[int, str], str | None] = lambda _exit_code, _stderr: None
    """(exit code, standard error) -> why the program could not run there, in a sentence; None if it is not known."""
    python: str = sys.executable
    """The interpreter there, in which Paceline is installed."""

    def output_of(self, program: Sequence[str], timeout_s: float) -> str:
        """What a program prints there.

        Raises:
            LaunchError: it cannot be run, or fails; says why.
        """
        argv = self.argv(program, {})
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
        except (OSError, subprocess.TimeoutExpired) as problem:
            where = ", ".join(self.hostnames) or "this node"
            raise LaunchError(f"{argv[0]} on {where} does not answer: {reason_of(problem)}.") from None
        if done.returncode != 0:
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"{argv[0]} failed")
            told = self.explain(done.returncode, done.stderr)
            raise LaunchError(told or f"{', '.join(self.hostnames)}: {last.strip()}")
        return done.stdout


HERE = Reach()


@dataclass(frozen=True)
class AgentCommand:
    """How torch's agent is started by one local process."""

    reach: Reach
    program: tuple[str, ...]
    environ: dict[str, str]
    """Variables for the agent and its workers, in addition to those of their node."""

    @property
    def argv(self) -> Sequence[str]:
        return self.reach.argv(self.program, self.environ)


def agent_commands(
    plan: Plan,
    program: Sequence[str],
    options: LaunchOptions,
    reaches: Sequence[Reach] = (HERE,),
    endpoint: str = "127.0.0.1:0",
    launched_at: float = 0.0,
) -> list[AgentCommand]:
    """The commands that start the agents of a run; starts nothing and touches no file.

    Args:
        program: what would follow `python` on a command line: ("train.py", "--flag") or ("-m", "a.module").
        reaches: one for each node of the plan, in its order, or one for all nodes if they have as many workers each.
        endpoint: address and port on the first node where the agents meet.
        launched_at: in seconds since the epoch.

    Raises:
        LaunchError: more workers on a node than it has GPUs in the plan.
    """
    shares = plan.placements
    commands = []
    for reach, share in zip(reaches, shares, strict=False):
        if share.devices and len(share.devices) < share.num_workers:
            raise LaunchError(
                f"{share.num_workers} workers cannot share {len(share.devices)} GPUs of "
                f"{share.hostname or 'this node'}; give every worker one."
            )
        variables = {
            **_variables(plan, options, launched_at),
            **(env.note(env.NODE, reach.hostnames[0].rpartition("@")[2]) if len(reach.hostnames) == 1 else {}),
            **({env.CPUS: ";".join(",".join(map(str, cpus)) for cpus in share.cpus)} if share.cpus else {}),
        }
        if share.devices:
            devices = ",".join(map(str, share.devices))
            variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
        arguments = ["--nnodes", str(len(shares)), "--nproc-per-node", str(share.num_workers)]
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", options.run_dir.name]
        arguments += ["--max-restarts", str(options.max_restarts), "--log-dir", os.devnull, *options.torchrun]
        agent = (reach.python, "-m", "paceline.launch.agent", *arguments, *program)
        commands.append(AgentCommand(reach, agent, variables | dict(options.environ)))
    return commands


def _variables(plan: Plan, options: LaunchOptions, launched_at: float) -> dict[str, str]:
    variables = {
        "OMP_NUM_THREADS": str(plan.threads_per_worker),
        "MKL_NUM_THREADS": str(plan.threads_per_worker),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code says where Python was
        # Workers that torch's agent restarts would read addresses of dead peers from the store of the agents.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        env.RUN_DIR: str(options.run_dir.absolute()),  # a script may change its working directory
        env.LAUNCHED_AT: repr(launched_at),
        env.OUTPUT: options.output,
    }
    if options.hang_timeout_s is not None:
        variables[env.HANG_TIMEOUT] = repr(options.hang_timeout_s)
    if options.interface is not None:
        variables |= dict.fromkeys(env.INTERFACE_VARIABLES, options.interface)
    if plan.debug_comm:
        # Not TORCH_DISTRIBUTED_DEBUG=DETAIL: torch 2.13 crashes with it in DistributedDataParallel over Gloo.
        variables |= {env.DEBUG_COMM: "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,COLL"}
    return variables


def run_workers(
    plan: Plan,
    program: Sequence[str],
    options: LaunchOptions,
    reaches: Sequence[Reach] = (HERE,),
    endpoint: str = "127.0.0.1:0",
) -> None:
    """Run `program` in every worker of `plan` and return when all of them have ended without an error.

    The arguments are those of `agent_commands`. When a worker fails, hangs, or is lost with its node, or when this
    process gets SIGINT, SIGTERM or SIGHUP, every worker gets SIGTERM, and SIGKILL half a minute later; a second signal
    kills at once. What a worker started is killed when it has ended. SIGUSR1 is passed on: it asks training to save a
    checkpoint. Signals are handled only where this is called from the main thread; the handlers found are put back.

    Raises:
        LaunchError: a worker cannot be started, or a node cannot be reached.
        PacelineError: a worker met a mistake of the user; carries its sentence.
        WorkerFailed: a worker failed, hangs, or is lost; names the first one that did so on its own. The report is in
            failure.json and failure.txt in the run folder.
        KeyboardInterrupt: SIGINT came.
        SystemExit: SIGTERM or SIGHUP came; the code is 128 + the number of the signal.
    """
    prepare(options.run_dir)
    commands = agent_commands(plan, program, options, reaches, endpoint, time.time())
    with _caught_signals() as events, contextlib.ExitStack() as at_end:
        agents = [at_end.enter_context(_Agent(command, events)) for command in commands]
        first, interrupted_by = _await_end(agents, events)
    if interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if interrupted_by is not None:
        raise SystemExit(128 + interrupted_by)
    if first is None:
        return
    report = describe_failure(options.run_dir, _loss(first, options.run_dir))
    if report is None:
        told = first.command.reach.explain(first.exit_code or 0, first.stderr)
        raise LaunchError(told or f"Torch's agent ended with exit code {first.exit_code} before any worker failed.")
    if report.is_user_error:
        raise PacelineError(report.sentence)
    code = 1 if report.exit_code is None else report.exit_code
    raise WorkerFailed(
        report.sentence,
        rank=next(iter(report.ranks), None),
        details=report.evidence,
        exit_code=code if code > 0 else 128 - code,
        report=report.save(options.run_dir),
    )


def prepare(run_dir: Path) -> None:
    """Make the folders, readable only by the user, and delete files of an earlier run in the same folder."""
    with file_problems(f"The run folder {run_dir} cannot be used", LaunchError, "name another one with out = DIR"):
        for folder in (run_dir, run_dir / "logs", run_dir / "workers"):
            make_run_folder(folder)
        for pattern in ("workers/*.json", "logs/rank*", "failure.json", "failure.txt", "failure-*.*"):
            for note in run_dir.glob(pattern):
                note.unlink()


class _Agent:
    """The local process that carries the agents of some nodes, until the block is left."""

    def __init__(self, command: AgentCommand, events: queue.SimpleQueue[_Agent | int]) -> None:
        self.command = command
        self._tail: deque[str] = deque(maxlen=20)
        self.ended_at = float("inf")
        """When it ended, in seconds since the epoch."""
        is_here = not command.reach.hostnames
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=env.everything() | (command.environ if is_here else {}),
                stdin=subprocess.PIPE,
                stdout=None if is_here else subprocess.PIPE,
                stderr=None if is_here else subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        except OSError as problem:
            raise LaunchError(f"{command.argv[0]} cannot be started: {reason_of(problem)}.") from None
        self._threads = [threading.Thread(target=self._await, args=(events,), daemon=True)]
        if not is_here:
            self._threads += [threading.Thread(target=self._show, args=(target,), daemon=True) for target in (1, 2)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> _Agent:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        for thread in self._threads:
            thread.join(GRACE_S)
        if self._process.poll() is None:
            self._process.kill()

    @property
    def exit_code(self) -> int | None:
        """As in subprocess; None before the end."""
        return self._process.poll()

    @property
    def stderr(self) -> str:
        """The last lines of its standard error, if it is on another node."""
        return "".join(self._tail)

    def ask(self, what: Literal["TERM", "USR1"]) -> None:
        """Have a signal sent to all workers."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(what.encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """End the agent and all workers at once: it finds its standard input closed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _await(self, events: queue.SimpleQueue[_Agent | int]) -> None:
        self._process.wait()
        self.ended_at = time.time()
        events.put(self)

    def _show(self, target: int) -> None:
        stream = self._process.stdout if target == 1 else self._process.stderr
        assert stream is not None
        for line in stream:
            if target == 2:
                self._tail.append(line.decode(errors="replace"))
            with contextlib.suppress(OSError), _one_line_at_a_time:
                os.write(target, line)


_one_line_at_a_time = threading.Lock()


def _await_end(agents: Sequence[_Agent], events: queue.SimpleQueue[_Agent | int]) -> tuple[_Agent | None, int | None]:
    """Return when all agents have ended; when the first fails, or a signal comes, the others are asked to end.

    Returns:
        The first agent that failed, and the signal that asked for the end of the run if it came before.
    """
    first, interrupted_by, deadline = None, None, None
    while any(agent.exit_code is None for agent in agents):
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            deadline = None
            for agent in agents:
                agent.kill()
            continue
        if event == signal.SIGUSR1:
            for agent in agents:
                agent.ask("USR1")
            continue
        is_ending = first is not None or interrupted_by is not None
        if isinstance(event, _Agent):
            if event.exit_code == 0 or is_ending:
                continue
            first = event
        elif is_ending:
            interrupted_by = event if first is None else interrupted_by
            deadline = time.monotonic()
            continue
        else:
            interrupted_by = event
        deadline = time.monotonic() + SAVE_S + GRACE_S
        for agent in agents:
            agent.ask("TERM")
    if first is None and interrupted_by is None:  # all have ended before the first was heard of
        first = next((agent for agent in agents if agent.exit_code), None)
    return first, interrupted_by


@contextlib.contextmanager
def _caught_signals() -> Iterator[queue.SimpleQueue[_Agent | int]]:
    """While the block is open, signals do not end this process but are events; none come outside of the main thread."""
    events: queue.SimpleQueue[_Agent | int] = queue.SimpleQueue()
    if threading.current_thread() is not threading.main_thread():
        yield events
        return

    def note(number: int, _frame: FrameType | None) -> None:
        events.put(number)  # SimpleQueue.put may interrupt a get, and itself

    # Signals that the caller ignores (nohup, a shell's background job) stay ignored.
    wanted = (*_ENDINGS, signal.SIGUSR1)
    heeded = [number for number in wanted if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loss(agent: _Agent, run_dir: Path) -> NodeLoss | None:
    """The loss of a node, or of its agent alone; None where the agent has said itself that a worker failed."""
    reach, now = agent.command.reach, agent.ended_at
    if agent.exit_code == 1:
        return None
    hostname = reach.hostnames[0].rpartition("@")[2] if len(reach.hostnames) == 1 else ""
    workers = read_beginnings(run_dir)
    ranks = tuple(one.rank for one in workers if not reach.hostnames or one.hostname == hostname)
    if not ranks:
        return None
    if not reach.hostnames:
        return NodeLoss("agent_lost", workers[0].hostname, now, ranks)
    if "not responding" in agent.stderr:
        return NodeLoss("node_silent", hostname, now, ranks)
    try:
        reach.output_of(["true"], ANSWER_S)
    except LaunchError:
        return NodeLoss("node_down", hostname, now, ranks)
    return NodeLoss("agent_lost", hostname, now, ranks)
