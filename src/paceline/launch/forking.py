"""Workers forked from a process of this node that has loaded what they load: a restart need not wait for torch.

A worker that the server (fork_server.py) forks becomes a child of the process that asked for it, which takes in the
orphans of its descendants; only Linux can do that. Everything that holds for a worker that was started holds for it: it
dies with its launcher, and its exit code is the launcher's to collect.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline import env
from paceline.launch.commands import WORKER

ANSWER_S = 10.0
"""A server that does not answer for so long is of no use."""

PR_SET_CHILD_SUBREAPER = 36
"""From <linux/prctl.h>."""

NUMBER = struct.Struct("!I")
"""How the length of a request travels, and the pid that answers it."""


class Process(Protocol):
    """A child of this process, whoever started it."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Its exit code, once it has ended; the number of the signal that ended it is negative."""


@dataclass(frozen=True)
class Adopted:
    """A child that somebody else forked."""

    pid: int

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The fork server of this node, seen from the process that starts workers; the kernel ends it with that process."""

    def __init__(self, preload: Sequence[str]) -> None:
        """`preload` names the modules to load."""
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._has_loaded = False
        self._early: dict[str, str] = {}
        """The variables it was started with that may have been read since."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def has_loaded(self) -> bool:
        """Whether it can fork at once; true of one that has died since, too."""
        if self._connection is not None and not self._has_loaded:
            self._has_loaded = bool(select.select([self._connection], [], [], 0)[0]) and bool(self._connection.recv(1))
        return self._has_loaded

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Have a server that can fork workers with such `variables`; returns before it has loaded."""
        early = env.read_early(variables)
        if sys.platform != "linux" or (self._is_alive and self._early == early):
            return
        self.close()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_S)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "paceline.launch.fork_server", str(theirs.fileno()), *self._preload],
                    env=env.everything() | early | env.CUDA_BY_NVML,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:  # no room for another process: a restart takes longer, no more
                ours.close()
                return
        self._connection, self._early = ours, early

    def fork(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        streams: tuple[int, int, int],
        sockets: Mapping[str, int],
    ) -> Process | None:
        """A worker of this command line and these variables over our own; None if the server cannot make it now.

        Args:
            streams: descriptors for its standard input, output and error.
            sockets: listening sockets, by the variables that are to name their descriptors.
        """
        is_worker = tuple(argv[: len(WORKER)]) == WORKER
        if not (is_worker and self.has_loaded and self._early == env.read_early(variables)):
            return None
        assert self._connection is not None
        request = {"program": argv[len(WORKER) :], "environ": env.everything() | dict(variables), "sockets": [*sockets]}
        text = json.dumps(request).encode()
        descriptors = [*streams, *sockets.values()]
        try:
            socket.send_fds(self._connection, [NUMBER.pack(len(text))], descriptors)
            self._connection.sendall(text)
            return Adopted(*NUMBER.unpack(receive(self._connection, NUMBER.size)))
        except (OSError, EOFError):  # it has died, or stands still
            self.close()
            return None

    def close(self) -> None:
        """End the server; the workers that it forked go on."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None
        self._has_loaded = False

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises `EOFError` if the other end is gone before."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError("the other end is gone")
        received += part
    return received
