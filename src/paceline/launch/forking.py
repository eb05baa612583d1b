"""Workers forked from a process of this node that has loaded torch, so that it is loaded once for all of them.

A worker that the server (fork_server.py) forks becomes a child of the process that asked for it, which is the
subreaper of its descendants (Linux only). It behaves like a worker that was started directly: it dies with its
launcher, and the launcher collects its exit code.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline import env

ANSWER_S = 10.0
"""Timeout for an answer of the server."""

LOAD_S = 120.0
"""Time for the server to load; after that workers are started without it."""
LOAD_WAIT_S = 40.0
"""Time for the server of an agent to load: the agent does nothing else meanwhile."""

_LOOK_S = 0.1

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
"""From <linux/prctl.h>."""

NICENESS = 5
"""How nice the server is while it loads beside workers that train."""

NUMBER = struct.Struct("!I")
"""The encoding of a request's length, and of the pid in the answer."""


@dataclass(frozen=True)
class Adopted:
    """A child of this process that the fork server forked."""

    pid: int

    def wait(self) -> int:
        """The exit code once the process has ended; negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The fork server of this node, seen from the process that starts workers; the kernel ends it with that process."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._has_loaded = False
        self._adopted_before = False
        self._name = f"{os.getpid()}-{id(self)}"
        self._early: dict[str, str] = {}
        """The variables that the server was started with and may have read."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def mark(self) -> bytes:
        """What stands in the environment of the server, of the workers that it forks, and of what these fork."""
        return f"{env.FORKED_BY}={self._name}".encode()

    @property
    def has_loaded(self) -> bool:
        """Whether the server has loaded and can fork at once; also true if it has died since."""
        return self._has_loaded or self._loads_within(0.0)

    def load(self, variables: Mapping[str, str], timeout_s: float, is_interrupted: Callable[[], bool]) -> None:
        """`prepare`, and return once the server has loaded or died, after `timeout_s`, or soon after
        `is_interrupted()`."""
        self.prepare(variables, is_awaited=True)
        deadline = time.monotonic() + timeout_s
        while self._is_alive and not self._has_loaded and time.monotonic() < deadline and not is_interrupted():
            self._loads_within(_LOOK_S)

    def _loads_within(self, seconds: float) -> bool:
        if self._connection is not None and select.select([self._connection], [], [], seconds)[0]:
            self._has_loaded = bool(self._connection.recv(1))
        return self._has_loaded

    def prepare(self, variables: Mapping[str, str], *, is_awaited: bool = False) -> None:
        """Ensure a server that can fork workers with these `variables`; returns before it has loaded.

        It loads at low priority, beside workers that train, unless it `is_awaited`.
        """
        early = env.read_early(variables)
        if self._is_alive and self._early == early:
            return
        self.close()
        ours, theirs = socket.socketpair()
        options = [str(theirs.fileno()), "0" if is_awaited else str(NICENESS)]
        ours.settimeout(ANSWER_S)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "paceline.launch.fork_server", *options, *self._preload],
                    env=env.everything() | dict(variables) | env.CUDA_BY_NVML | {env.FORKED_BY: self._name},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:  # no room for another process: only a restart takes longer
                ours.close()
                return
        self._connection, self._early = ours, early
        self._adopted_before = _adopt_orphans(True)

    def fork(
        self,
        program: Sequence[str],
        variables: Mapping[str, str],
        streams: tuple[int, int, int],
        sockets: Mapping[str, int],
    ) -> Adopted | None:
        """Fork a worker with these variables over our own; None if the server cannot do it now.

        Args:
            program: what the worker runs, as on the command line of a new one.
            streams: descriptors for its standard input, output and error.
            sockets: listening sockets, keyed by the variables that name their descriptors.
        """
        if not (self.has_loaded and self._early == env.read_early(variables)):
            return None
        assert self._connection is not None
        request = {"program": [*program], "environ": env.everything() | dict(variables), "sockets": [*sockets]}
        text = json.dumps(request).encode()
        descriptors = [*streams, *sockets.values()]
        try:
            socket.send_fds(self._connection, [NUMBER.pack(len(text))], descriptors)
            self._connection.sendall(text)
            return Adopted(*NUMBER.unpack(receive(self._connection, NUMBER.size)))
        except (OSError, EOFError):  # the server has died or is stuck
            self.close()
            return None

    def close(self) -> None:
        """End the server; the workers that it forked keep running."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            _adopt_orphans(self._adopted_before)
        self._process = self._connection = None
        self._has_loaded = False

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None


def _adopt_orphans(yes: bool) -> bool:
    """Say whether this process becomes the parent of descendants whose own parents end; returns what was so before."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
    return bool(before.value)


def receive(connection: socket.socket, size: int) -> bytes:
    """Read an exact number of bytes; raises `EOFError` if the other end is closed before."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError("the other end is closed")
        received += part
    return received
