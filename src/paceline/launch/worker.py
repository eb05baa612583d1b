"""The process between torch's agent and one worker: it starts the worker's program and sees it to its end.

The agent forks it. The program is what would follow `python`; it runs unchanged, in a process group of its own. Its
output is copied to its log, and in whole lines to where the launcher's goes, by default that of rank 0 alone, which
writes to a terminal itself. Signals that ask it to end, or to save, are passed on to it alone: it may need its loaders
to save a checkpoint. When it has ended, in whatever way, all that it started is killed, a note says how it ended, and
this process ends with its exit code, or 128 plus the number of the signal that ended it. When the agent dies,
everything is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from paceline import env
from paceline.diagnosis.failures import (
    MOST_EVIDENCE_LINES,
    Failure,
    WorkerProcess,
    describe_failure,
    failure_in,
    failure_path,
    log_path,
    place_in,
    write_note,
)
from paceline.heartbeat import read_vitals
from paceline.words import number_of

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From <linux/prctl.h>."""
AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SAVE_S = 28.0
"""From the request to end to SIGKILL: what schedulers allow, and a little less than torch's agent does."""
LEAVING_S = 5.0
"""From a worker's loss of its peers to the end of all, so that one that leaves without an error is seen to."""
REAP_S = 2.0
"""The maximum wait for the end of killed processes; one in uninterruptible sleep is left."""
CHUNK_BYTES = MOST_TAIL_BYTES = 1 << 16


def main(program: Sequence[str]) -> None:
    """Run `program` to its end, and end as it did; returns where it ended without an error."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    agent = env.value(env.AGENT, int)
    _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if agent != os.getppid():
        os._exit(128 + signal.SIGKILL)  # the agent died before the line above
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the program become children of this process
    facts, run_dir = env.worker_facts(), env.value(env.RUN_DIR, Path)
    restart = env.value(env.RESTART, int) or 0
    assert run_dir is not None
    if cpus := env.cpus(facts.local_rank):
        os.sched_setaffinity(0, cpus)
    if facts.rank == 0:
        _tell_restart(run_dir, restart)
    with tempfile.TemporaryDirectory(prefix="paceline-worker-") as folder:
        heartbeat = Path(folder) / "heartbeat"
        output = _Output(facts.rank, run_dir, restart)
        process = subprocess.Popen(
            [sys.executable, "-u", *program],
            # A crash in native code says where Python was.
            env=os.environ | {env.HEARTBEAT: str(heartbeat), "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output.pipe,
            stderr=output.pipe,
            process_group=0,
            preexec_fn=_as_program,
        )
        note = WorkerProcess(facts.rank, facts.world_size, process.pid, env.text(env.NODE) or socket.gethostname())
        write_note(run_dir, note, restart)
        output.start(process)
        num_kills = count_oom_kills(process.pid)
        asked_at = _attend(process, agent)
        is_oom_counted = count_oom_kills(process.pid) > num_kills
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not yet reaped: until then the number is its own
        exit_code = process.wait()
        _kill_orphans()
        tail, vitals = output.end(), read_vitals(heartbeat)
        failure = failure_in(tail, time.time()) if exit_code == 1 else None
        with contextlib.suppress(OSError, ValueError):
            failure = Failure(**json.loads(failure_path(heartbeat, process.pid).read_text()))
    note = replace(
        note,
        exit_code=exit_code,
        time=failure.time if failure else time.time(),
        asked_at=asked_at,
        out_of_memory=exit_code == -signal.SIGKILL and (is_oom_counted or _kernel_log_names(process.pid)),
        step=vitals.step,
        collective=vitals.collective,
        place=place_in(tail, exit_code),
        output="\n".join(tail.splitlines()[-MOST_EVIDENCE_LINES:]),
        failure=failure,
    )
    write_note(run_dir, note, restart)
    if note.is_consequence and asked_at is None:  # who left early lost its connections first, and is about to end
        signal.sigtimedwait(AWAITED[1:], LEAVING_S)  # till the agent asks: somebody else has failed
    if exit_code:
        os._exit(exit_code if exit_code > 0 else 128 - exit_code)
    for number in AWAITED:  # the agent has it wait for the other workers
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _tell_restart(run_dir: Path, restart: int) -> None:
    """Say which failure the run goes on after, if it does; the report of the one before restart K is failure-K.json."""
    # An agent counts the failures of its own workers alone.
    report = describe_failure(run_dir, restart=restart - 1 if restart else None)
    if report is None:
        return
    for file in run_dir.glob("failure.*"):
        file.unlink()
    number = 1 + len(list(run_dir.glob("failure-*.json")))
    report.save(run_dir, f"failure-{number}")
    step = "" if report.step is None else f" after {number_of(report.step, 'step')}"
    print(f"paceline: {report.sentence.rstrip('.')}{step}; restart {number}", file=sys.stderr, flush=True)


def _attend(process: subprocess.Popen[bytes], agent: int | None) -> float | None:
    """Pass on signals until the program has ended; leaves it to be reaped. Returns when it was asked to end, in seconds
    since the epoch; None: it was not."""
    asked_at, deadline = None, float("inf")  # clocks of the day are set, forward and back
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        came = signal.sigtimedwait(AWAITED, 1.0)
        number = None if came is None else came.si_signo
        if number not in (None, signal.SIGCHLD, signal.SIGUSR1):
            asked_at, deadline = asked_at or time.time(), min(deadline, time.monotonic() + SAVE_S)
        if os.getppid() != agent or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
        elif number not in (None, signal.SIGCHLD):
            os.kill(process.pid, number)  # not by `process`, which may reap it
    return asked_at


def _as_program() -> None:
    """Called in the new process: it is killed when this one ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # "Save a checkpoint now" must not end a program that has nothing to save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class _Output:
    """The output of the program: everything to its log, whole lines to the terminal, after the rank of the worker."""

    def __init__(self, rank: int, run_dir: Path, restart: int) -> None:
        self.prefix = b"" if rank == 0 else b"[rank %d] " % rank if env.text(env.OUTPUT) == "all" else None
        """None: its lines are not shown."""
        # On a terminal, where it may draw progress, rank 0 writes itself.
        self.pipe = None if rank == 0 and os.isatty(2) else subprocess.PIPE
        """For both streams of the program."""
        self._threads: list[threading.Thread] = []
        try:
            self.log = open(log_path(run_dir, rank), "a+b" if restart else "w+b", buffering=0)  # noqa: SIM115
        except OSError:  # a full disk is no reason not to train
            self.log = open(os.devnull, "w+b", buffering=0)  # noqa: SIM115

    def start(self, process: subprocess.Popen[bytes]) -> None:
        """Begin to copy what the program writes."""
        for target, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe is not None:
                self._threads.append(threading.Thread(target=self._copy, args=(pipe, target), daemon=True))
                self._threads[-1].start()

    def end(self) -> str:
        """Copy what is left once the program has ended, and return the end of the log."""
        for thread in self._threads:
            thread.join(REAP_S)  # a process that is left may have the pipe open
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - MOST_TAIL_BYTES))
        return self.log.read().decode(errors="replace")

    def _copy(self, pipe: BinaryIO, target: int) -> None:
        unfinished = b""
        while chunk := os.read(pipe.fileno(), CHUNK_BYTES):
            with contextlib.suppress(OSError):  # a full disk must not stop the program, which would block
                self.log.write(chunk)
            # Progress bars end their lines with \r; a very long line is shown as several.
            end = len(chunk) if len(unfinished) > CHUNK_BYTES else max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            self._show(unfinished + chunk[:end] if end else b"", target)
            unfinished = chunk[end:] if end else unfinished + chunk
        self._show(unfinished, target)

    def _show(self, text: bytes, target: int) -> None:
        """Write whole lines; the system mixes none of up to 4,096 bytes with one that another process writes."""
        if self.prefix is None:
            return
        for line in text.splitlines(keepends=True):
            line = self.prefix + line + (b"" if line.endswith((b"\n", b"\r")) else b"\n")
            with contextlib.suppress(OSError):  # a reader that has gone
                while line:
                    line = line[os.write(target, line) :]


def count_oom_kills(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of out-of-memory kills in the control group (version 2) of `pid`; 0 where it is not known.

    The control group of a process that has ended is known until the process is reaped.
    """
    with contextlib.suppress(OSError, ValueError):
        (group,) = re.findall(r"^0::/(.*)$", (proc / str(pid) / "cgroup").read_text(), re.MULTILINE)
        events = (cgroups / group / "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    return 0


def _kernel_log_names(pid: int) -> bool:
    """Whether the kernel's log, where it can be read, says that it killed `pid` for memory: version 1 of control groups
    counts nothing."""
    with contextlib.suppress(OSError):
        return b"ut of memory: Killed process %d " % pid in subprocess.run(["dmesg"], capture_output=True).stdout
    return False


def _kill_orphans() -> None:
    """Kill what the program has left in sessions of its own: children of this process by now."""
    import psutil  # 10 ms that no start has to wait for

    deadline, this = time.monotonic() + REAP_S, psutil.Process()
    while (left := this.children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)
