"""The processes of this node that have loaded what workers load: a restart need not wait for torch.

A standby (standby.py) is a plain child of the process that starts workers. It becomes a worker when it is sent what a
new process would have been given: descriptors for its standard streams, its environment and its arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import env
from paceline.launch.commands import WORKER


@dataclass(frozen=True)
class _Standby:
    process: subprocess.Popen[bytes]
    ours: socket.socket
    early: dict[str, str]
    """The variables it was started with that may have been read since."""

    @property
    def has_loaded(self) -> bool:
        """True of one that has died, too: nobody needs to wait for it."""
        return bool(select.select([self.ours], [], [], 0)[0])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.ours.close()


class Standbys:
    """The standbys of this node; the kernel ends them with the thread that starts them."""

    def __init__(self, preload: Sequence[str]) -> None:
        """`preload` names the modules to load."""
        self._preload = tuple(preload)
        self._waiting: deque[_Standby] = deque()

    @property
    def pids(self) -> list[int]:
        """Of those that wait."""
        return [standby.process.pid for standby in self._waiting]

    @property
    def num_loaded(self) -> int:
        return sum(standby.has_loaded for standby in self._waiting)

    def keep(self, number: int, variables: Mapping[str, str]) -> None:
        """Have `number` standbys for workers with such `variables`: starts one, once the one before it has loaded."""
        early = env.read_early(variables)
        while self._waiting and (len(self._waiting) > number or self._waiting[0].early != early):
            self._waiting.popleft().close()
        if len(self._waiting) == number or (self._waiting and not self._waiting[-1].has_loaded):
            return
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "paceline.launch.standby", str(theirs.fileno()), *self._preload],
                    env=env.everything() | early,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:  # no room for another process: a restart takes longer, no more
                ours.close()
                return
        self._waiting.append(_Standby(process, ours, early))

    def take(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        streams: tuple[int, int, int],
        store_fd: int | None,
    ) -> subprocess.Popen[bytes] | None:
        """A standby that becomes the worker of this command line and these variables over our own; None if none can.

        Args:
            streams: descriptors for its standard input, output and error.
            store_fd: the listening socket of the meeting point, for rank 0.
        """
        if tuple(argv[: len(WORKER)]) != WORKER:
            return None
        early = env.read_early(variables)
        order = {"program": list(argv[len(WORKER) :]), "environ": env.everything() | dict(variables)}
        descriptors = [*streams, *(() if store_fd is None else (store_fd,))]
        while self._waiting:
            standby = self._waiting.popleft()
            if standby.early == early and standby.process.poll() is None:
                _end_niceness(standby.process.pid)
                with contextlib.suppress(OSError), standby.ours as connection:  # it may have died just now
                    socket.send_fds(connection, [b"."], descriptors)
                    connection.sendall(json.dumps(order).encode())
                    return standby.process
            standby.close()
        return None

    def close(self) -> None:
        """End those that wait."""
        while self._waiting:
            self._waiting.popleft().close()


def _end_niceness(pid: int) -> None:
    """Give a process its priority back, even while it loads; on Linux each of its threads has one of its own."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
