"""A process that loads what workers will load, then forks them.

    python -m paceline.launch.fork_server FD NICENESS module package.module

Over the socket FD it reports that it has loaded. Then it receives the descriptors, the environment and the program of
each worker and answers with its pid. It exits when the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import env
from paceline.launch.forking import NUMBER, receive
from paceline.launch.worker import die_with_launcher
from paceline.launch.worker import main as work

_CAP_SYS_NICE = 23
"""From <linux/capability.h>."""


def main(arguments: Sequence[str]) -> None:
    """Load the named modules, then fork workers until the socket is closed."""
    die_with_launcher()
    niceness, may_return = os.getpriority(os.PRIO_PROCESS, 0), _may_return_from_niceness()
    if may_return:
        os.nice(int(arguments[1]))
    request = None
    with socket.socket(fileno=int(arguments[0])) as connection:
        if _is_alone(connection):
            return
        gc.disable()  # hardly anything that modules make is garbage; to look for it takes a fifth of the time
        for module in arguments[2:]:
            with contextlib.suppress(ImportError):  # the program reports it itself
                importlib.import_module(module)
        gc.freeze()  # memory that the collector does not touch stays shared with the workers
        gc.enable()
        with contextlib.suppress(OSError, EOFError):
            request = serve(connection)
    if request is not None:
        if may_return:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        become_worker(**request)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork workers: returns in each of them with its request, and in the server when the socket is closed."""
    connection.sendall(b".")  # ready
    while True:
        header, descriptors, _, _ = socket.recv_fds(connection, NUMBER.size, 8)
        if not header:
            return None
        request: dict[str, Any] = json.loads(receive(connection, *NUMBER.unpack(header)))
        if _fork(connection):
            sockets = dict(zip(request["sockets"], descriptors[3:], strict=True))
            return request | {"streams": descriptors[:3], "sockets": sockets}
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(connection: socket.socket) -> bool:
    """Fork an orphan and send its pid; returns True in the orphan, once its new parent knows the pid."""
    (go_read, go_write), (pid_read, pid_write) = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        orphan = os.fork()
        if orphan:
            os.write(pid_write, NUMBER.pack(orphan))
            os._exit(0)
        os.close(go_write)
        if not os.read(go_read, 1):
            os._exit(1)  # the server died before it could send the pid
        for descriptor in (go_read, pid_read, pid_write):
            os.close(descriptor)
        return True
    os.waitpid(middle, 0)  # from now on the orphan has the parent whose death ends it
    try:
        connection.sendall(os.read(pid_read, NUMBER.size))
        os.write(go_write, b".")
    finally:
        for descriptor in (go_read, go_write, pid_read, pid_write):
            os.close(descriptor)
    return False


def become_worker(
    program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int], sockets: Mapping[str, int]
) -> None:
    """Give this process the state of a new process, and run the worker's program.

    Args:
        streams: descriptors of standard input, output and error.
        sockets: descriptors of listening sockets, keyed by the variables that name them.
    """
    os.setsid()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    env.become(environ, sockets)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # workers must draw different numbers, as new processes do
    work(program)


def _is_alone(connection: socket.socket) -> bool:
    """Whether the process that started this one died before it could ask the kernel to die with it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _may_return_from_niceness() -> bool:
    """Whether this process may take back its priority once it has given it up."""
    try:
        status = Path("/proc/self/status").read_text()
        capabilities = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
        return bool(capabilities >> _CAP_SYS_NICE & 1) or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20
    except (OSError, StopIteration, AttributeError):
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
