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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from paceline import env
from paceline.errors import LaunchError, PacelineError, WorkerFailed, file_problems, reason_of
from paceline.files import make_run_folder
from paceline.launch.command_lines import output_of, with_variables

if TYPE_CHECKING:
    from paceline.spec import Plan

SAVE_S = 30.0
"""Time for workers to save a checkpoint when they are asked to end: what torch's agent allows, too."""
GRACE_S = 5.0
"""How much longer an agent may take to end than its workers."""
POLL_S = 0.05
"""How often the agents are looked at."""


@dataclass(frozen=True)
class LaunchOptions:
    """Settings of all workers of a run, on all nodes."""

    run_dir: Path
    output: Literal["rank0", "all"] = "rank0"
    """Which workers' output is shown: rank 0's, or all lines, each with its rank in front; logs have everybody's."""
    max_restarts: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers over those of their node."""
    torchrun: tuple[str, ...] = ()
    """Further arguments of torchrun."""


@dataclass(frozen=True)
class Transport:
    """How to start a program on some nodes at once: by a local process with the program's standard streams."""

    hostnames: tuple[str, ...] = ()
    """Empty: this node."""
    argv: Callable[[Sequence[str], Mapping[str, str]], Sequence[str]] = with_variables
    """(program, environment variables that it needs there) -> the local command line."""
    python: str = sys.executable
    """The interpreter there, in which Paceline is installed."""

    @property
    def node(self) -> str:
        """The name of its node; empty for this one, and where there are several."""
        return self.hostnames[0].rpartition("@")[2] if len(self.hostnames) == 1 else ""

    def output_of(self, program: Sequence[str], timeout_s: float) -> str:
        """What a program prints there. Raises `LaunchError` where it cannot be run, or fails."""
        return output_of(self.argv(program, {}), timeout_s, node=self.node)


_HERE = Transport()


def agent_commands(
    plan: Plan,
    program: Sequence[str],
    options: LaunchOptions,
    transports: Sequence[Transport] = (_HERE,),
    endpoint: str = "127.0.0.1:0",
) -> list[Sequence[str]]:
    """The local command lines that start the agents of a run, one for each of `transports`; starts nothing. Raises
    `LaunchError` for more workers on a node than it has GPUs in the plan.

    Args:
        program: what would follow `python` on a command line: ("train.py", "--flag") or ("-m", "a.module").
        transports: one for each node of the plan, in its order, or one for all nodes if they have as many workers each.
        endpoint: address and port on the first node where the agents meet.
    """
    commands = []
    for transport, placement in zip(transports, plan.placements, strict=False):
        if placement.devices and len(placement.devices) < placement.num_workers:
            raise LaunchError(
                f"{placement.num_workers} workers cannot share {len(placement.devices)} GPUs of "
                f"{placement.hostname or 'this node'}; give every worker one."
            )
        environ = {
            "OMP_NUM_THREADS": str(plan.threads_per_worker),
            env.RUN_DIR: str(options.run_dir.absolute()),  # a script may change its working directory
            env.OUTPUT: options.output,
        }
        if plan.debug_comm:
            # Not TORCH_DISTRIBUTED_DEBUG=DETAIL: torch 2.13 crashes with it in DistributedDataParallel over Gloo.
            environ |= {env.DEBUG_COMM: "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,COLL"}
        if placement.devices:
            devices = ",".join(map(str, placement.devices))
            environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
        environ |= env.variable(env.NODE, transport.node)
        environ |= env.variable(env.CPUS, ";".join(",".join(map(str, cpus)) for cpus in placement.cpus))
        arguments = ["--nnodes", str(len(plan.placements)), "--nproc-per-node", str(placement.num_workers)]
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", options.run_dir.name]
        arguments += ["--max-restarts", str(options.max_restarts), *options.torchrun]
        agent = (transport.python, "-m", "paceline.launch.agent", *arguments, *program)
        commands.append(transport.argv(agent, environ | dict(options.environ)))
    return commands


def run_workers(
    plan: Plan,
    program: Sequence[str],
    options: LaunchOptions,
    transports: Sequence[Transport] = (_HERE,),
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
    options = replace(options, environ={env.LAUNCHED_AT: repr(time.time()), **options.environ})
    commands = agent_commands(plan, program, options, transports, endpoint)
    agents: list[_Agent] = []
    with _caught_signals() as signals:
        try:
            for transport, argv in zip(transports, commands, strict=False):
                agents.append(_Agent(transport, argv))
            first, interrupted_by = _await_end(agents, signals)
        finally:
            for agent in agents:
                agent.close()
    if interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if interrupted_by is not None:
        raise SystemExit(128 + interrupted_by)
    if first is not None:
        raise _failure_of(first, options.run_dir)


def _failure_of(first: _Agent, run_dir: Path) -> PacelineError:
    """The error that a run ends with; `first`: the first agent that ended with one. No start loads what tells it."""
    from paceline.diagnosis.failures import NodeLoss, describe_failure, read_notes, signal_name, silent_node

    told, exit_code = first.told, first.exit_code or 0
    number = -exit_code if exit_code < 0 else exit_code - 128  # as a shell on another node says it
    is_killed = 0 < number < signal.NSIG  # then its last line may be a worker's; 255 is ssh's own
    ended = f"its agent was ended by {signal_name(number)}" if is_killed else told or f"exit code {exit_code}"
    loss: NodeLoss | None = NodeLoss(first.transport.node, first.ended_at, ended)
    # An agent that ends with 1 says that a worker failed, maybe by a loss elsewhere; one of several nodes is not named.
    if exit_code == 1 or len(first.transport.hostnames) > 1:
        loss = silent_node(run_dir, GRACE_S) if first.transport.hostnames else None
    report = describe_failure(run_dir, loss)
    if report is None:
        why = told or f"{first.transport.python} ended with exit code {exit_code}"
        what = f"Workers failed without a note in {run_dir}" if read_notes(run_dir) else "Nothing runs"
        return LaunchError(f"{what} on {', '.join(first.transport.hostnames) or 'this node'}: {why}.")
    saved = report.save(run_dir)
    if report.is_user_error:
        return PacelineError(report.sentence)
    code = 1 if report.exit_code is None else report.exit_code
    return WorkerFailed(
        report.sentence,
        rank=report.ranks[0],
        details=report.evidence,
        exit_code=code if code > 0 else 128 - code,
        report=saved,
    )


def prepare(run_dir: Path) -> None:
    """Make the folders, readable only by the user, and delete files of an earlier run in the same folder."""
    with file_problems(f"The run folder {run_dir} cannot be used", LaunchError, "name another one with out = DIR"):
        for folder in (run_dir, run_dir / "logs", run_dir / "workers"):
            make_run_folder(folder)
        for pattern in ("workers/*.json", "workers.json", "logs/rank*", "failure.json", "failure.txt", "failure-*.*"):
            for note in run_dir.glob(pattern):
                note.unlink()


class _Agent:
    """The local process that carries the agents of some nodes, until it is closed."""

    def __init__(self, transport: Transport, argv: Sequence[str]) -> None:
        self.transport = transport
        self.told = ""
        """The last line of its standard error, if it is on another node."""
        self.ended_at = float("inf")
        """When its end was noticed, in seconds since the epoch."""
        pipe = subprocess.PIPE if transport.hostnames else None
        try:
            # In a session of its own: Ctrl-C reaches this process alone.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as problem:
            raise LaunchError(f"{argv[0]} cannot be started: {reason_of(problem)}.") from None
        assert self._process.stdin is not None
        self._line = self._process.stdin
        self._threads = [
            threading.Thread(target=self._show, args=(stream, target), daemon=True)
            for target, stream in ((1, self._process.stdout), (2, self._process.stderr))
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code as `subprocess` gives it; None before the end."""
        if self._process.poll() is not None:
            self.ended_at = min(self.ended_at, time.time())
        return self._process.returncode

    def ask(self, what: Literal["TERM", "USR1"]) -> None:
        """Have a signal sent to all workers."""
        with contextlib.suppress(OSError, ValueError):
            self._line.write(what.encode() + b"\n")
            self._line.flush()

    def kill(self) -> None:
        """End the agent and all workers at once: it finds its standard input closed."""
        with contextlib.suppress(OSError):
            self._line.close()

    def close(self) -> None:
        """End everything, in any case."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._process.kill()
        for thread in self._threads:
            thread.join(GRACE_S)

    def _show(self, stream: IO[bytes], target: int) -> None:
        for line in stream:
            if target == 2 and line.strip():
                self.told = line.decode(errors="replace").strip().rstrip(".")
            with contextlib.suppress(OSError):
                os.write(target, line)


def _await_end(agents: Sequence[_Agent], signals: queue.SimpleQueue[int]) -> tuple[_Agent | None, int | None]:
    """Wait until all agents have ended; when the first fails, or a signal comes, the others are asked to end. Returns
    the first agent that failed, and the signal that asked for the end of the run if it came before."""
    first, interrupted_by, deadline = None, None, float("inf")
    while None in [agent.exit_code for agent in agents]:
        number = None
        with contextlib.suppress(queue.Empty):
            number = signals.get(timeout=POLL_S)
        failed = next((agent for agent in agents if agent.exit_code), None)
        if number == signal.SIGUSR1:
            for agent in agents:
                agent.ask("USR1")
        elif number is not None and deadline < float("inf"):  # asked twice: now
            deadline = 0.0
        elif deadline == float("inf") and (number is not None or failed is not None):
            first, interrupted_by, deadline = failed, number, time.monotonic() + SAVE_S + GRACE_S
            for agent in agents:
                agent.ask("TERM")
        if time.monotonic() > deadline:
            for agent in agents:
                agent.kill()
    if interrupted_by is None:  # all may have ended before the first was heard of
        first = first or next((agent for agent in agents if agent.exit_code), None)
    return first, interrupted_by


@contextlib.contextmanager
def _caught_signals() -> Iterator[queue.SimpleQueue[int]]:
    """While the block is open, signals do not end this process but are told; none come outside of the main thread."""
    came: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may interrupt a `get`, and itself
    is_main = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if is_main else ()
    # Signals that the caller ignores (nohup, a shell's background job) stay ignored.
    heeded = [number for number in wanted if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, _frame: came.put(number)) for number in heeded}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
