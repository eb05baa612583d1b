"""The process between torch's agent and one worker: it starts the worker's program and sees it to its end.

    python -m paceline.launch.worker train.py --flag

The program is what would follow `python`; it runs unchanged, in a process group of its own. Its output is copied to
its log, and in whole lines to the terminal. Signals that ask it to end, or to save, are passed on to it alone: it may
need its loaders to save a checkpoint. When it has ended, in whatever way, all that it started is killed, a note says
how it ended, and this process ends in the same way. When the agent dies, everything is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from paceline import env
from paceline.diagnosis.failures import Beginning, Ending, log_path, read_failures, write_note
from paceline.diagnosis.last_traceback import LastTraceback
from paceline.heartbeat import read_vitals
from paceline.words import number_of

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From <linux/prctl.h>."""
SAVE_S = 28.0
"""From the request to end to SIGKILL: what schedulers allow, and a little less than torch's agent does."""
REAP_S = 2.0
"""The maximum wait for the end of killed processes; one in uninterruptible sleep is left."""
CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 16
"""A longer line is shown as several lines; the log has it unbroken."""

_CONTROLS = re.compile(rb"\x1b\[[0-9;]*[mK]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Colours of text and the erasing of a line, whole, or single control characters."""


def main(program: Sequence[str]) -> NoReturn:
    """Run `program` to its end, and end as it did."""
    agent = env.number(env.AGENT)
    _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if agent != os.getppid():
        os._exit(128 + signal.SIGKILL)  # the agent died before the line above
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the program become children of this process
    facts, run_dir = env.worker_facts(), env.path(env.RUN_DIR)
    hostname, restart = env.node_name(), env.number(env.RESTART) or 0
    assert run_dir is not None
    if cpus := env.cpus(facts.local_rank):
        os.sched_setaffinity(0, cpus)
    if facts.rank == 0 and (restart or any(run_dir.glob("workers/ending-*"))):  # an agent counts its own failures
        _tell_restart(run_dir, restart - 1 if restart else None)
    heartbeat = Path(tempfile.mkdtemp(prefix="paceline-worker-")) / "heartbeat"
    noticed = _signals_as_bytes()
    with _Output(facts.rank, run_dir, restart) as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *program],
            env=env.everything() | {env.HEARTBEAT: str(heartbeat)},
            stdin=subprocess.DEVNULL,
            stdout=output.target(1),
            stderr=output.target(2),
            process_group=0,
            preexec_fn=_as_program,
        )
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            write_note(run_dir, Beginning(facts.rank, process.pid, hostname), restart)
        kills_before = count_oom_kills(process.pid)
        asked_at = _attend(process, noticed, output, agent)
        kills_after = count_oom_kills(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not yet reaped: until then the number is its own
        exit_code = process.wait()
        _kill_orphans()
        output.drain()
    vitals = read_vitals(heartbeat)
    ending = Ending(
        rank=facts.rank,
        world_size=facts.world_size,
        pid=process.pid,
        hostname=hostname,
        exit_code=exit_code,
        time=time.time(),
        asked_at=asked_at,
        out_of_memory=exit_code == -signal.SIGKILL
        and (
            any(count > kills_before.get(file, count) for file, count in kills_after.items())
            or _kernel_log_names(process.pid)
        ),
        step=vitals.step,
        collective=vitals.collective,
    )
    with contextlib.suppress(OSError):
        has_told = facts.rank in read_failures(run_dir, restart)
        if exit_code == 1 and not has_told and output.errors.began_at is not None:
            write_note(run_dir, output.errors.failure(facts.rank, process.pid), restart)
        write_note(run_dir, ending, restart)
    heartbeat.unlink(missing_ok=True)
    heartbeat.parent.rmdir()
    _end_as(exit_code)


def _tell_restart(run_dir: Path, start: int | None) -> None:
    """Say which failure of which start (None: of the last) the run goes on after; before restart K: failure-K.json."""
    from paceline.diagnosis.report import describe_failure

    report = describe_failure(run_dir, restart=start)
    if report is None:
        return
    for file in run_dir.glob("failure.*"):
        file.unlink()
    number = 1 + len(list(run_dir.glob("failure-*.json")))
    report.save(run_dir, f"failure-{number}")
    step = "" if report.step is None else f" after {number_of(report.step, 'step')}"
    print(f"paceline: {report.sentence.rstrip('.')}{step}; restart {number}", file=sys.stderr, flush=True)


def _attend(process: subprocess.Popen[bytes], noticed: int, output: _Output, agent: int | None) -> float | None:
    """Pass on signals and output until the program has ended; leaves it to be reaped.

    Returns:
        When it was asked to end, in seconds since the epoch; None: it was not.
    """
    asked_at = None
    with selectors.DefaultSelector() as selector:
        selector.register(noticed, selectors.EVENT_READ)
        for descriptor in output.sources:
            selector.register(descriptor, selectors.EVENT_READ)
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            for key, _ in selector.select(1.0 if asked_at else None):
                if key.fd != noticed:
                    if not output.copy(key.fd):
                        selector.unregister(key.fd)
                    continue
                for number in os.read(noticed, 64):
                    if os.getppid() != agent:
                        asked_at = asked_at or time.time()
                        os.killpg(process.pid, signal.SIGKILL)
                    elif number == signal.SIGUSR1:
                        process.send_signal(number)
                    elif number != signal.SIGCHLD:
                        asked_at = asked_at or time.time()
                        process.send_signal(number)
            if asked_at is not None and time.time() - asked_at > SAVE_S:
                os.killpg(process.pid, signal.SIGKILL)
    return asked_at


def _signals_as_bytes() -> int:
    """A pipe that brings the numbers of signals to this process, so that none interrupts anything."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, lambda _number, _frame: None)
    return read_end


def _as_program() -> None:
    """In the new process: it dies with this one."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # "Save a checkpoint now" must not end a program that has nothing to save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class _Output:
    """The output of the program: everything to its log, whole lines to the terminal, after the rank of the worker."""

    def __init__(self, rank: int, run_dir: Path, restart: int) -> None:
        shows_all = env.text(env.OUTPUT) == "all"
        self._prefix = b"" if rank == 0 else b"[rank %d] " % rank if shows_all else None
        mode: Literal["ab", "wb"] = "ab" if restart else "wb"
        try:
            self._log = open(log_path(run_dir, rank), mode, buffering=0)  # noqa: SIM115
        except OSError:  # a full disk is no reason not to train
            self._log = open(os.devnull, "wb", buffering=0)  # noqa: SIM115
        # Workers of one node write one after the other; open it anew, since a lock belongs to an open file.
        self._lock = open(env.text(env.OUTPUT_LOCK) or os.devnull, "wb")  # noqa: SIM115
        self._targets: dict[int, int] = {}
        """The descriptors that show what comes from each pipe."""
        self._unfinished: dict[int, bytes] = {}
        """The beginning of a line that is not complete yet, of each pipe."""
        self._is_terminal = rank == 0 and os.isatty(2)
        self._write_ends: list[int] = []
        self.errors = LastTraceback()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_error: object) -> None:
        self._log.close()
        self._lock.close()

    @property
    def sources(self) -> list[int]:
        """The descriptors to read from, once the program has been started."""
        while self._write_ends:
            os.close(self._write_ends.pop())
        return list(self._targets)

    def target(self, descriptor: int) -> int:
        """Where the program writes in place of standard output (1) or error (2): on a terminal rank 0 writes itself."""
        if self._is_terminal:
            return descriptor
        read_end, write_end = os.pipe()
        self._targets[read_end] = descriptor
        self._write_ends.append(write_end)
        return write_end

    def copy(self, source: int) -> bool:
        """Copy what has come; whether more may come."""
        chunk = os.read(source, CHUNK_BYTES)
        with contextlib.suppress(OSError):  # a full disk must not stop the program, which would block on a full pipe
            self._log.write(chunk)
        # Progress bars end their lines with \r.
        lines = (self._unfinished.pop(source, b"") + chunk).splitlines(keepends=True)
        if lines and chunk and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < LONGEST_LINE_BYTES:
            self._unfinished[source] = lines.pop()
        elif lines and not lines[-1].endswith((b"\n", b"\r")):
            lines[-1] += b"\n"
        if self._targets[source] == 2:
            self.errors.read(lines)
        if lines and self._prefix is not None:
            self._show(self._targets[source], b"".join(self._prefix + _harmless(line) for line in lines))
        return bool(chunk)

    def drain(self) -> None:
        """Copy what is left; nobody writes any more."""
        for source in self._targets:
            os.set_blocking(source, False)
            with contextlib.suppress(BlockingIOError):
                while self.copy(source):
                    pass

    def _show(self, target: int, text: bytes) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            with contextlib.suppress(OSError):  # a reader that has gone
                while text:
                    text = text[os.write(target, text) :]
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _harmless(line: bytes) -> bytes:
    """A line whose control characters are written in words (ESC as \\x1b), but for colours, tabs and ends of lines.

    Escape sequences could move to other workers' lines, change the title, or have the terminal type an answer.
    """
    return _CONTROLS.sub(lambda found: found.group() if len(found.group()) > 1 else b"\\x%02x" % found.group()[0], line)


def count_oom_kills(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[Path, int]:
    """The number of out-of-memory kills in the control group (version 2) of `pid`, by the file that counts them.

    The control group of a process that has ended is known until the process is reaped.
    """
    with contextlib.suppress(OSError):
        groups = re.search(r"^0::/(.*?)( \(deleted\))?$", (proc / str(pid) / "cgroup").read_text(), re.MULTILINE)
        for root in (cgroups, cgroups / "unified"):
            file = root / (groups[1] if groups else "") / "memory.events"
            if file.exists() and (found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)):
                return {file: int(found[1])}
    return {}


def _kernel_log_names(pid: int) -> bool:
    """Whether the kernel's log records that it killed `pid` for memory: in version 1 of control groups the one of a
    process that has ended is not known. False if the log is not readable."""
    wanted = re.compile(rb"[Oo]ut of memory: Killed process %d\b" % pid)
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        while not wanted.search(os.read(log, 8192)):
            pass
    except OSError:  # EAGAIN at its end, EPIPE where it was overwritten meanwhile
        return False
    finally:
        os.close(log)
    return True


def _kill_orphans() -> None:
    """Kill what the program has left in sessions of its own: children of this process by now."""
    import psutil

    deadline, this = time.monotonic() + REAP_S, psutil.Process()
    while (left := this.children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)


def _end_as(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left one if one is wanted
        if -exit_code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
