"""What happens to a run on one node in a soak: faults of its processes, its files and its sockets."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .runs import Worker

PAUSE_S = 8.0
"""Longer than the runs' hang timeout."""

_LISTENS = "0A"
"""A state in /proc/net/tcp."""


@dataclass(frozen=True)
class Struck:
    """The processes of a run."""

    launcher_pid: int
    workers: Sequence[Worker]
    chance: random.Random

    def one(self) -> Worker:
        return self.chance.choice(self.workers)

    def pids(self) -> list[int]:
        return [self.launcher_pid, *(worker.pid for worker in self.workers)]


def kill_one(struck: Struck) -> None:
    _send(struck.one().pid, signal.SIGKILL)


def kill_all(struck: Struck) -> None:
    for worker in struck.workers:
        _send(worker.pid, signal.SIGKILL)


def stop_one(struck: Struck) -> None:
    _send(struck.one().pid, signal.SIGSTOP)


def kill_fork_server(struck: Struck) -> None:
    """The next start has to do without it."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == struck.launcher_pid and b"paceline.launch.fork_server" in (process / "cmdline").read_bytes():
                _send(int(process.name), signal.SIGKILL)


def pause_everything(struck: Struck) -> None:
    """As a laptop's lid does, for longer than the hang timeout."""
    for pid in struck.pids():
        _send(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for pid in reversed(struck.pids()):
        _send(pid, signal.SIGCONT)


def ask_to_save(struck: Struck) -> None:
    _send(struck.launcher_pid, signal.SIGUSR1)


def refuse_writes(struck: Struck) -> None:
    """For a while no file of a worker may become longer than a kilobyte."""
    limits = {}
    for worker in struck.workers:
        with contextlib.suppress(OSError):
            limits[worker.pid] = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1024, limits[worker.pid][1]))
    time.sleep(PAUSE_S)
    for pid, before in limits.items():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def send_garbage(struck: Struck) -> None:
    """To every TCP port at which the run listens; some connections stay open and say nothing."""
    with contextlib.ExitStack() as open_ones:
        for address in set(_listening(struck.pids())):
            for garbage in (b"", struck.chance.randbytes(64), struck.chance.randbytes(100_000)):
                with contextlib.suppress(OSError):
                    connection = open_ones.enter_context(socket.create_connection(address, timeout=1))
                    connection.sendall(garbage)
        time.sleep(PAUSE_S)


STRIKES: dict[str, Callable[[Struck], None]] = {
    "kill one": kill_one,
    "kill all": kill_all,
    "stop one": stop_one,
    "kill the fork server": kill_fork_server,
    "pause everything": pause_everything,
    "ask to save": ask_to_save,
    "refuse writes": refuse_writes,
    "send garbage": send_garbage,
}


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _listening(pids: Sequence[int]) -> Iterator[tuple[str, int]]:
    """The addresses at which processes of this network listen for TCP."""
    for pid in pids:
        with contextlib.suppress(OSError):
            own = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
            for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and f"socket:[{words[9]}]" in own:
                    address, port = words[1].split(":")
                    yield socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)
