"""The workers of one node, seen from the process that started them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal, Protocol

from paceline import env
from paceline.errors import LaunchError
from paceline.heartbeat import read_vitals
from paceline.launch.commands import WORKER, WorkerCommand
from paceline.launch.failures import Ending, Failure, failure_path, log_path, spare_failure_path, stack_path
from paceline.launch.forking import Adopted, ForkServer
from paceline.launch.hang import WatchClock, WorkerState
from paceline.launch.out_of_memory import count_oom_kills, kernel_log_names
from paceline.launch.output import LinePump, Show, check_open_files, is_behind, show_here

Output = Literal["rank0", "all"]
Process = subprocess.Popen[bytes] | Adopted

STACKS_WAIT_S = 1.0
"""How long a worker may take to dump its stacks; Python's own handler needs milliseconds."""
REAP_WAIT_S = 2.0
"""The maximum wait for the end of killed processes."""


HANG_TIMEOUT_S = 60.0
GRACE_S = 3.0


@dataclass(frozen=True)
class LaunchOptions:
    """Settings of all workers of a run, on all nodes."""

    run_dir: Path
    interface: str | None = None
    """The network interface between nodes; None: one on which all nodes reach the first."""
    output: Output = "rank0"
    """Whose lines are shown: those of rank 0, or all, each with its rank in front; logs have the others'."""
    grace_s: float = GRACE_S
    """Seconds between SIGTERM and SIGKILL."""
    save_s: float | None = None
    """Seconds between SIGTERM and SIGKILL for workers that have something to save; None: `grace_s`."""
    hang_timeout_s: float = HANG_TIMEOUT_S
    """How long workers may wait for another one, or a node be silent, before the run is ended."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers over those of their node."""
    preload: tuple[str, ...] = ()
    """Modules that a fork server on each node loads, for this start or, in an elastic run, for the next one; empty: no
    fork server. On the launcher's own node the server is made by the launcher, and an elastic run alone reads this."""
    is_elastic: bool = False
    """Whether a failure is followed by a restart: no worker is asked to end, and one that does not end by itself within
    a moment, and is not saving a checkpoint, is killed."""
    restart: int = 0
    """How often the run has been started before; output is appended to the logs."""


class Team(Protocol):
    """The workers of one node, local or remote; it reports to the events of the run."""

    hostname: str
    """The name of the node; empty for this node."""

    @property
    def running(self) -> Sequence[int]:
        """The ranks that have not ended."""

    def collect(self, rank: int) -> Ending:
        """How an exited worker ended; called once per worker."""

    def states(self) -> list[WorkerState]:
        """The states of the running workers."""

    def silent_s(self) -> float:
        """Seconds since the last message from the node; 0 for this node."""

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of these workers; an empty text for a worker that cannot dump them."""

    def prepare_standby(self) -> None:
        """Make a restart of an elastic run quick; called regularly by the thread that started the workers."""

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these workers (None: to all), SIGKILL to what they have started too.

        SIGUSR1 asks to save a checkpoint, SIGTERM to end; the child processes of a worker are killed after it.
        """


@dataclass(frozen=True)
class WorkerExited:
    """A worker has ended; its team gives its ending."""

    team: Team
    rank: int


@dataclass(frozen=True)
class TeamLost:
    """The connection to a node's agent has ended without being closed by the launcher."""

    team: Team


@dataclass(frozen=True)
class Signalled:
    """This process got a signal that asks it to end, or to have a checkpoint saved."""

    number: int


Event = WorkerExited | TeamLost | Signalled
Events = queue.SimpleQueue[Event]
"""Events of a run, as its supervisor receives them."""


class LocalTeam:
    """Starts and watches the workers of this node."""

    hostname = ""

    def __init__(
        self,
        options: LaunchOptions,
        notify: Callable[[Event], None],
        fork_server: ForkServer | None = None,
    ) -> None:
        """Prepare a team; starts no worker.

        Args:
            notify: receives events; called from any thread.
            fork_server: forks the workers if it can, and is prepared for the next start of an elastic run.
        """
        self._notify = notify
        self._fork_server = fork_server
        self._variables: list[dict[str, str]] = []
        self._options = options
        self._run_dir = options.run_dir
        self._running: dict[int, Process] = {}
        self._clock = WatchClock(options.hang_timeout_s)
        self._stopped_since: dict[int, float] = {}
        self._blocked_at: dict[int, float] = {}
        self._inherits: set[int] = set()
        """The worker that writes to our own standard output and error."""
        self._oom_kills: dict[int, int | None] = {}
        self._pump: LinePump | None = None
        self._heartbeats = tempfile.TemporaryDirectory(prefix="paceline-heartbeat-", ignore_cleanup_errors=True)
        # A worker that finds this pipe without a writer knows that this process has died.
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(
        self,
        commands: Sequence[WorkerCommand],
        *,
        sockets: Mapping[str, int] | None = None,
        show: Show | None = None,
    ) -> None:
        """Start every worker, each in a session of its own, so that Ctrl-C reaches this process alone.

        Args:
            sockets: listening sockets for rank 0, keyed by the variables that name their descriptors.
            show: shows the workers' lines; None: this process does, and rank 0 writes to its terminal directly.

        Raises:
            LaunchError: more workers than there can be open files for, or the system refuses another process.
        """
        if self._options.output == "all" or show is not None:
            check_open_files(len(commands))
            self._pump = LinePump(show or show_here)
        for command in commands:
            inherited = sockets or {} if command.rank == 0 else {}
            try:
                process = self._popen(command, inherited, inherits=command.rank == 0 and show is None)
            except OSError as error:
                raise LaunchError(
                    f"Worker {command.rank} cannot be started on this machine: {error.strerror or error}."
                ) from error
            self._running[command.rank] = process
            self._variables.append(command.variables)
            self._oom_kills[command.rank] = count_oom_kills(process.pid)
            threading.Thread(
                target=self._report_exit, args=(command.rank, process), name=f"worker-{command.rank}-end", daemon=True
            ).start()
        if self._pump is not None:
            self._pump.start()

    @property
    def running(self) -> Sequence[int]:
        return tuple(self._running)

    def collect(self, rank: int) -> Ending:
        seen_at = time.time()
        process = self._running.pop(rank)
        before, after = self._oom_kills.pop(rank), count_oom_kills(process.pid)
        # Its children first: until it is reaped, its pid cannot have become another group's.
        _kill_group(process)
        exit_code = process.wait()
        _reap_group(process.pid)
        ran_out = exit_code == -signal.SIGKILL and (
            (before is not None and after is not None and after > before) or kernel_log_names(process.pid)
        )
        places = (failure_path(self._run_dir, rank), spare_failure_path(self._heartbeat(rank)))
        notes = (Failure.read(place) for place in places if exit_code)
        # Not that of an earlier worker of that rank.
        failure = next((note for note in notes if note is not None and note.pid == process.pid), None)
        ended_at = seen_at if failure is None else failure.time
        if failure is not None and failure.exit_code is not None:
            exit_code, failure = failure.exit_code, None
        vitals = read_vitals(self._heartbeat(rank))
        return Ending(
            rank=rank,
            pid=process.pid,
            exit_code=exit_code,
            time=ended_at,
            failure=failure,
            out_of_memory=ran_out,
            step=vitals.step,
            collective=vitals.collective,
            trained_s=vitals.trained_s,
        )

    def states(self) -> list[WorkerState]:
        return [self._state(rank, process.pid) for rank, process in self._running.items()]

    def _state(self, rank: int, pid: int) -> WorkerState:
        now = time.monotonic()
        is_stopped, memory_bytes, processor_s = _read_process(pid)
        if not is_stopped:
            self._stopped_since.pop(rank, None)
        if self._awaits_reader(rank):
            self._blocked_at[rank] = now

        def watched_s(seconds: float | None) -> float | None:
            return None if seconds is None else self._clock.watched_s(seconds)

        vitals = vars(read_vitals(self._heartbeat(rank)))
        watched = {name: watched_s(vitals[name]) for name in ("inside_s", "heartbeat_age_s")}
        return WorkerState(
            **vitals | watched,
            rank=rank,
            pid=pid,
            stopped_s=watched_s(now - self._stopped_since.setdefault(rank, now)) if is_stopped else None,
            output_blocked_s=None if rank not in self._blocked_at else now - self._blocked_at[rank],
            memory_bytes=memory_bytes,
            processor_s=processor_s,
        )

    def _awaits_reader(self, rank: int) -> bool:
        """Whether the worker's output is not being read, so that its next line may block."""
        if self._pump is not None and self._pump.is_behind(rank):
            return True
        return rank in self._inherits and (is_behind(1) or is_behind(2))

    def silent_s(self) -> float:
        return 0.0

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        asked = [rank for rank in ranks if rank in self._running]
        before = {rank: _size(stack_path(self._run_dir, rank)) for rank in asked}
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running[rank].pid, signal.SIGUSR2)
        deadline = time.monotonic() + STACKS_WAIT_S
        written = dict.fromkeys(asked, "")
        while asked and time.monotonic() < deadline:
            time.sleep(0.02)
            for rank in tuple(asked):
                text = _read_from(stack_path(self._run_dir, rank), before[rank])
                if text and text == written[rank]:  # unchanged between two reads, so complete
                    asked.remove(rank)
                written[rank] = text
        return written

    def prepare_standby(self) -> None:
        if not self._options.is_elastic or self._fork_server is None or len(self._running) < len(self._variables):
            return
        # Not while workers start: they would get to their first step later.
        if all(state.trained_s is not None for state in self.states()):
            self._fork_server.prepare(self._variables[0])

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        for rank, process in self._running.items():
            if ranks is not None and rank not in ranks:
                continue
            if number == signal.SIGKILL:
                _kill_group(process)
            # Before its first heartbeat it would die of a request to save.
            elif number == signal.SIGTERM or read_vitals(self._heartbeat(rank)).heartbeat_age_s is not None:
                # Not to its child processes: a worker may need its loaders to save a checkpoint.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)  # not yet reaped: the pid is its own

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self._running.values():  # how they ended is known: it need not be looked for
            process.wait()
            _reap_group(process.pid)
        self._running.clear()
        if self._pump is not None:
            self._pump.close()
        os.close(self._lifeline_read)
        os.close(self._lifeline_write)
        self._kill_descendants()
        self._heartbeats.cleanup()

    def _kill_descendants(self) -> None:
        """Kill what workers started in sessions of its own: it has its worker's variables, or the fork server's."""
        server = self._fork_server
        marks = (f"{env.HEARTBEAT}={self._heartbeats.name}/".encode(), *([] if server is None else [server.mark]))
        killed = []
        for process in Path("/proc").glob("[0-9]*"):
            if server is not None and int(process.name) == server.pid:
                continue
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if any(one.startswith(marks) for one in (process / "environ").read_bytes().split(b"\0")):
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(int(process.name))
        _reap(killed)

    def _heartbeat(self, rank: int) -> Path:
        return Path(self._heartbeats.name) / f"rank{rank}"

    def _popen(self, command: WorkerCommand, sockets: Mapping[str, int], *, inherits: bool) -> Process:
        if inherits:
            self._inherits.add(command.rank)
            return self._spawn(command, sockets)  # a terminal stays a terminal
        log = self._open_log(command.rank)
        if self._pump is None:
            with log:
                return self._spawn(command, sockets, log.fileno(), log.fileno())
        prefix = b"" if command.rank == 0 else b"[rank %d] " % command.rank if self._options.output == "all" else None
        with self._pump.pipes(command.rank, prefix=prefix, log=log) as (out, err):
            return self._spawn(command, sockets, out, err)

    def _open_log(self, rank: int) -> IO[bytes]:
        restart = self._options.restart
        log = open(log_path(self._run_dir, rank), "ab" if restart else "wb", buffering=0)  # noqa: SIM115
        if restart:
            with contextlib.suppress(OSError):  # a full disk is no reason not to train
                log.write(b"--- restart %d: rank %d begins here ---\n" % (restart, rank))
        return log

    def _spawn(
        self,
        command: WorkerCommand,
        sockets: Mapping[str, int],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Process:
        variables = command.variables | env.node_variables(self._heartbeat(command.rank), sockets)
        if self._fork_server is not None:
            streams = (self._lifeline_read, 1 if stdout is None else stdout, 2 if stderr is None else stderr)
            process = self._fork_server.fork(command.program, variables, streams, sockets)
            if process is not None:
                return process
        # The kernel ties a worker's life to the thread that starts it: this one, which stays to the end.
        return subprocess.Popen(
            [*WORKER, *command.program],
            env=env.everything() | variables,
            stdin=self._lifeline_read,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(sockets.values()),
            start_new_session=True,
        )

    def _report_exit(self, rank: int, process: Process) -> None:
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves it to be reaped
        except ChildProcessError:
            return  # `close` has reaped it
        self._notify(WorkerExited(self, rank))


def with_age(ending: Ending, now: float) -> Ending:
    """Convert the time to an age for another node, whose clock may differ, and back."""
    return replace(ending, time=now - ending.time)


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _reap_group(group: int) -> None:
    """Reap a dead worker's children if this process is their subreaper (`fork_server`)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _reap(killed: Sequence[int]) -> None:
    """Reap those of the killed processes that are ours by now, as they are where this process adopts orphans.

    One in uninterruptible sleep, such as on a file server that is gone, ends when the kernel lets it: it is left.
    """
    deadline, left = time.monotonic() + REAP_WAIT_S, list(killed)
    while left and time.monotonic() < deadline:
        for pid in tuple(left):
            try:
                has_ended = os.waitpid(pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                has_ended = True  # somebody else's
            if has_ended:
                left.remove(pid)
        if left:
            time.sleep(0.01)


def _read_process(pid: int) -> tuple[bool, int | None, float | None]:
    """Whether SIGSTOP or a debugger has stopped a process, its memory in bytes, and the processor time it has used."""
    try:
        # proc(5): behind the name come state, 10 fields, utime and stime in ticks, 8 fields, resident pages.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, None, None
    ticks = int(fields[11]) + int(fields[12])
    return fields[0] in "Tt", int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return (file.read(1 << 20) or b"").decode(errors="replace")
    except OSError:
        return ""
