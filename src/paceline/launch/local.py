"""Workers on this machine: start them, watch them, and let none of them outlive the run."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Literal

from paceline.errors import LaunchError, PacelineError, WorkerFailed
from paceline.launch.commands import WorkerCommand, worker_commands
from paceline.launch.failures import (
    Ending,
    Failure,
    failure_path,
    is_consequence,
    log_path,
    root_cause,
    sentence,
    stack_path,
)
from paceline.launch.output import LinePump

if TYPE_CHECKING:
    from paceline.spec import Plan

Output = Literal["rank0", "all"]
_Target = int | IO[bytes] | None

CULPRIT_WAIT_S = 1.0
"""How long to listen for the cause: a worker may say that it lost a peer before the peer says why it left."""

LOG_TAIL_LINES = 30


def run_workers(
    plan: Plan,
    program: Sequence[str],
    *,
    run_dir: Path,
    output: Output = "rank0",
    grace_s: float = 3.0,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run `program` in every worker of `plan` and return when all of them have ended without an error.

    `program` is what would follow `python` on a command line. Rank 0 writes to this process's own standard
    output and error; the others write to `run_dir`/logs/rankK.log and, with `output="all"`, here as well,
    each line with its rank in front. `environ` holds variables for the workers over this process's own.

    When a worker fails, or this process gets SIGINT, SIGTERM or SIGHUP, every worker and everything it started
    gets SIGTERM, and SIGKILL `grace_s` seconds later; a second signal kills at once. Signals are handled only
    where this is called from the main thread, and the handlers found are put back.

    Raises:
        LaunchError: a worker cannot be started.
        PacelineError: a worker met a mistake of the user; carries its sentence.
        WorkerFailed: a worker ended before its work did; names the first one that did so of its own accord.
        KeyboardInterrupt: SIGINT came.
        SystemExit: SIGTERM or SIGHUP came; the code is 128 + its number.
    """
    _prepare(run_dir)
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as rendezvous_dir:
        commands = worker_commands(
            plan,
            program,
            run_dir=run_dir,
            rendezvous_dir=Path(rendezvous_dir),
            launched_at=time.time(),
            environ=environ,
        )
        crew = _Crew(run_dir, grace_s)
        with _signals_to(crew.events), contextlib.closing(crew):
            crew.start(commands, output)
            crew.wait()
    if crew.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if crew.interrupted_by is not None:
        raise SystemExit(128 + crew.interrupted_by)
    if any(ending.failed for ending in crew.endings):
        raise _error_of(crew.endings, stopped_at=crew.stopped_at, run_dir=run_dir)


@dataclass(frozen=True)
class _Ended:
    rank: int
    time: float


class _Crew:
    """The worker processes of one run, from their start to the last one's end.

    All that happens arrives in `events`, in order: a worker that ended, or the number of a signal to us.
    """

    def __init__(self, run_dir: Path, grace_s: float) -> None:
        self.events: queue.SimpleQueue[_Ended | int] = queue.SimpleQueue()
        self.endings: list[Ending] = []
        self.interrupted_by: int | None = None
        self.stopped_at = float("inf")
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._deadline: float | None = None
        """On the monotonic clock: when to turn from listening to asking, or from asking to killing."""
        self._pump: LinePump | None = None
        # A worker that finds this pipe without a writer knows that this process died before it could be told.
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(self, commands: Sequence[WorkerCommand], output: Output) -> None:
        """Start every worker, each in a session of its own, so that Ctrl-C reaches this process alone.

        Raises:
            LaunchError: the system refuses another process.
        """
        if output == "all":
            self._pump = LinePump()
        for command in commands:
            try:
                process = self._popen(command)
            except OSError as error:
                raise LaunchError(
                    f"Worker {command.rank} of {len(commands)} cannot be started on this machine: {error}."
                ) from error
            self._running[command.rank] = process
            threading.Thread(
                target=_report_end,
                args=(command.rank, process, self.events),
                name=f"worker-{command.rank}-end",
                daemon=True,
            ).start()
        if self._pump is not None:
            self._pump.start()

    def wait(self) -> None:
        """Return when every worker has ended; the first failure, or a signal, ends the others."""
        while self._running:
            try:
                event = self.events.get(timeout=self._seconds_left())
            except queue.Empty:
                if self._is_stopping:
                    self._kill()
                else:
                    self._ask_to_end()
                continue
            if isinstance(event, _Ended):
                ending = self._note_end(event)
                if ending.failed and not self._is_stopping:
                    self._react_to(ending)
            elif self._is_stopping:
                self._kill()
            else:
                self._note_signal(event)
                self._ask_to_end()

    def close(self) -> None:
        """Kill what still runs, wait for it, and let go of pipes and logs."""
        self._kill()
        while self._running or not self.events.empty():
            event = self.events.get()
            if isinstance(event, _Ended):
                self._note_end(event)
            else:
                self._note_signal(event)  # too late to end anybody, but not to be obeyed
        if self._pump is not None:
            self._pump.close()
        os.close(self._lifeline_read)
        os.close(self._lifeline_write)

    @property
    def _is_stopping(self) -> bool:
        return self.stopped_at != float("inf")

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _popen(self, command: WorkerCommand) -> subprocess.Popen[bytes]:
        if command.rank == 0:
            return self._spawn(command)  # inherits: a terminal stays a terminal
        with contextlib.ExitStack() as on_error:
            path = log_path(self._run_dir, command.rank)
            log = on_error.enter_context(open(path, "wb", buffering=0))
            if self._pump is None:
                return self._spawn(command, stdout=log, stderr=subprocess.STDOUT)
            process = self._spawn(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            on_error.pop_all()  # the pump closes the log
        self._pump.add(process, rank=command.rank, log=log)
        return process

    def _spawn(self, command: WorkerCommand, stdout: _Target = None, stderr: _Target = None) -> subprocess.Popen[bytes]:
        # The kernel ties a worker's life to the thread that starts it: this one, which stays to the end.
        return subprocess.Popen(
            command.argv,
            env=command.environ,
            stdin=self._lifeline_read,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def _react_to(self, ending: Ending) -> None:
        if ending.failure is None or not is_consequence(ending.failure):
            self._ask_to_end()
        elif self._deadline is None:
            self._deadline = time.monotonic() + CULPRIT_WAIT_S

    def _note_end(self, ended: _Ended) -> Ending:
        process = self._running.pop(ended.rank)
        # Its children first: until it is reaped, its pid cannot have become another group's.
        _signal_group(process, signal.SIGKILL)
        exit_code = process.wait()
        failure = Failure.read(failure_path(self._run_dir, ended.rank)) if exit_code else None
        ending = Ending(
            rank=ended.rank,
            pid=process.pid,
            exit_code=exit_code,
            time=failure.time if failure is not None else ended.time,
            failure=failure,
        )
        self.endings.append(ending)
        return ending

    def _note_signal(self, number: int) -> None:
        # A failure that came before the signal is the better answer to why the run ended.
        if self.interrupted_by is None and not any(ending.failed for ending in self.endings):
            self.interrupted_by = number

    def _ask_to_end(self) -> None:
        self.stopped_at = time.time()
        self._deadline = time.monotonic() + self._grace_s
        for process in self._running.values():
            _signal_group(process, signal.SIGTERM)

    def _kill(self) -> None:
        self.stopped_at = min(self.stopped_at, time.time())
        self._deadline = None
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)


def _report_end(rank: int, process: subprocess.Popen[bytes], events: queue.SimpleQueue[_Ended | int]) -> None:
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves it to be reaped
    else:
        process.wait()
    events.put(_Ended(rank, time.time()))


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids what Linux does not find
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[_Ended | int]) -> Iterator[None]:
    """While open, signals that ask this process to end are put into `events` instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _frame: FrameType | None) -> None:
        events.put(number)  # SimpleQueue.put may interrupt a get, and itself

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
    except OSError as error:
        raise LaunchError(f"The run folder {run_dir} cannot be used: {error}.") from error


def _error_of(endings: Sequence[Ending], *, stopped_at: float, run_dir: Path) -> PacelineError:
    """What to tell the user about a run in which at least one worker failed."""
    root = root_cause(endings, stopped_at=stopped_at)
    if root.failure is not None and root.failure.is_user_error and not is_consequence(root.failure):
        return PacelineError(root.failure.message)
    return WorkerFailed(
        sentence(root, endings, stopped_at=stopped_at),
        rank=root.rank,
        details=_evidence(root, run_dir),
        exit_code=root.exit_code if root.exit_code > 0 else 128 - root.exit_code,
    )


def _evidence(ending: Ending, run_dir: Path) -> str:
    """A failed worker's traceback, else where a crash found it and its last lines; may be empty."""
    if ending.failure is not None:
        return ending.failure.traceback
    crash = _tail(stack_path(run_dir, ending.rank), None) if ending.exit_code < 0 else ""
    return crash + _tail(log_path(run_dir, ending.rank), LOG_TAIL_LINES)


def _tail(path: Path, num_lines: int | None) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, maxlen=num_lines))
    except OSError:
        return ""  # rank 0 has no log: it wrote to the terminal
