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
from paceline.diagnosis.failures import read_processes, signal_name
from paceline.diagnosis.report import NodeLoss, describe_failure
from paceline.errors import LaunchError, PacelineError, WorkerFailed, file_problems, reason_of
from paceline.regular_files import make_run_folder

if TYPE_CHECKING:
    from paceline.spec import Plan

SAVE_S = 30.0
"""Time for workers to save a checkpoint when they are asked to end: what torch's agent allows, too."""
GRACE_S = 5.0
"""How much longer an agent may take to end than its workers."""

Output = Literal["rank0", "all"]


@dataclass(frozen=True)
class LaunchOptions:
    """Settings of all workers of a run, on all nodes."""

    run_dir: Path
    output: Output = "rank0"
    """Whose lines are shown: those of rank 0, or all, each with its rank in front; logs have everybody's."""
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
    python: str = sys.executable
    """The interpreter there, in which Paceline is installed."""

    @property
    def node(self) -> str:
        """The name of its node; empty where there are several."""
        return self.hostnames[0].rpartition("@")[2] if len(self.hostnames) == 1 else ""

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
            raise self.error(done.returncode, done.stderr.splitlines())
        return done.stdout

    def error(self, exit_code: int, told: Sequence[str]) -> LaunchError:
        """Why a program there failed, by the last line that it, or what carries it, has `told`."""
        last = next((line.strip() for line in reversed(told) if line.strip()), f"exit code {exit_code}")
        hint = f"; see by hand what `ssh {self.hostnames[0]} {self.python} -V` says" if self.node else ""
        return LaunchError(f"Nothing runs on {', '.join(self.hostnames) or 'this node'}: {last.rstrip('.')}{hint}.")


HERE = Reach()


@dataclass(frozen=True)
class AgentCommand:
    """How torch's agent is started by one local process."""

    reach: Reach
    argv: Sequence[str]
    environ: dict[str, str]
    """Variables for the agent and its workers, in addition to those of their node; `argv` has them for other nodes."""


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
        environ = _variables(plan, options, launched_at) | env.note(env.NODE, reach.node)
        if share.cpus:
            environ[env.CPUS] = ";".join(",".join(map(str, cpus)) for cpus in share.cpus)
        if share.devices:
            devices = ",".join(map(str, share.devices))
            environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
        environ |= options.environ
        arguments = ["--nnodes", str(len(shares)), "--nproc-per-node", str(share.num_workers)]
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", options.run_dir.name]
        arguments += ["--max-restarts", str(options.max_restarts), "--log-dir", os.devnull, *options.torchrun]
        agent = (reach.python, "-m", "paceline.launch.agent", *arguments, *program)
        commands.append(AgentCommand(reach, reach.argv(agent, environ), environ))
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
    agents: list[_Agent] = []
    with _caught_signals() as events:
        try:
            for command in commands:
                agents.append(_Agent(command, events))
            first, interrupted_by = _await_end(agents, events)
        finally:
            for agent in agents:
                agent.close()
    if interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if interrupted_by is not None:
        raise SystemExit(128 + interrupted_by)
    if first is None:
        return
    report = describe_failure(options.run_dir, _loss(first, options.run_dir))
    if report is None:
        raise first.reach.error(first.exit_code or 0, first.told)
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
    """The local process that carries the agents of some nodes, until it is closed."""

    def __init__(self, command: AgentCommand, events: queue.SimpleQueue[_Agent | int]) -> None:
        self.reach = command.reach
        self.told: deque[str] = deque(maxlen=20)
        """The last lines of its standard error, if it is on another node."""
        self.ended_at = float("inf")
        """When it ended, in seconds since the epoch."""
        is_here = not command.reach.hostnames
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=os.environ | (command.environ if is_here else {}),
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

    @property
    def exit_code(self) -> int | None:
        """As in subprocess; None before the end."""
        return self._process.poll()

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

    def close(self) -> None:
        """End everything, in any case."""
        self.kill()
        for thread in self._threads:
            thread.join(GRACE_S)
        if self._process.poll() is None:
            self._process.kill()

    def _await(self, events: queue.SimpleQueue[_Agent | int]) -> None:
        self._process.wait()
        self.ended_at = time.time()
        events.put(self)

    def _show(self, target: int) -> None:
        stream = self._process.stdout if target == 1 else self._process.stderr
        assert stream is not None
        for line in stream:
            if target == 2:
                self.told.append(line.decode(errors="replace"))
            with contextlib.suppress(OSError), _one_line_at_a_time:
                os.write(target, line)


_one_line_at_a_time = threading.Lock()


def _await_end(agents: Sequence[_Agent], events: queue.SimpleQueue[_Agent | int]) -> tuple[_Agent | None, int | None]:
    """Return when all agents have ended; when the first fails, or a signal comes, the others are asked to end.

    Returns:
        The first agent that failed, and the signal that asked for the end of the run if it came before.
    """
    first, interrupted_by, deadline = None, None, float("inf")
    while any(agent.exit_code is None for agent in agents):
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()) if deadline < float("inf") else None)
        except queue.Empty:
            deadline = float("inf")
            for agent in agents:
                agent.kill()
            continue
        is_ending = first is not None or interrupted_by is not None
        if event == signal.SIGUSR1:
            for agent in agents:
                agent.ask("USR1")
        elif is_ending and not isinstance(event, _Agent):  # asked twice: now
            interrupted_by = event if first is None else interrupted_by
            deadline = 0.0
        elif not is_ending and not (isinstance(event, _Agent) and event.exit_code == 0):
            first, interrupted_by = (event, None) if isinstance(event, _Agent) else (None, event)
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

    def note(number: int, _frame: FrameType | None) -> None:
        events.put(number)  # SimpleQueue.put may interrupt a get, and itself

    is_main = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if is_main else ()
    # Signals that the caller ignores (nohup, a shell's background job) stay ignored.
    heeded = [number for number in wanted if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loss(agent: _Agent, run_dir: Path) -> NodeLoss | None:
    """The loss of a node, or of its agent alone; None where the agent has said itself that a worker failed."""
    exit_code, node = agent.exit_code or 0, agent.reach.node
    here = not agent.reach.hostnames
    workers = tuple(one for one in read_processes(run_dir, "started") if here or one.hostname == node)
    if exit_code == 1 or not workers:
        return None
    ended = f"its agent was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"exit code {exit_code}"
    told = next((line.strip().rstrip(".") for line in reversed(agent.told) if line.strip()), "")
    return NodeLoss(workers[0].hostname, agent.ended_at, ended if here or not told else told, workers)
