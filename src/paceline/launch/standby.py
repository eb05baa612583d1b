"""A process that loads what a worker will load, then waits to become one.

    python -m paceline.launch.standby FD module package.module

Over the socket FD it gets the descriptors, the environment and the program of the worker; an end without them means
that nobody needs it any more.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import env
from paceline.launch.worker import die_with_launcher
from paceline.launch.worker import main as work

NICENESS = 5
"""While it loads: the workers beside it come first."""

_CAP_SYS_NICE = 23
"""From <linux/capability.h>."""


def main(arguments: Sequence[str]) -> None:
    """Load the named modules, then wait to become a worker."""
    die_with_launcher()
    if _may_return_from_niceness():
        os.nice(NICENESS)  # who needs this process takes it back
    with socket.socket(fileno=int(arguments[0])) as connection:
        if _is_alone(connection):
            return
        for module in arguments[1:]:
            with contextlib.suppress(ImportError):  # the program itself will say it better
                importlib.import_module(module)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)  # says that it has loaded
        beginning, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        if not beginning:
            return  # nobody needs it any more
        text = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    try:
        order: dict[str, Any] = json.loads(text)
    except ValueError:
        return  # who sent it died in the middle
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
        os.close(descriptor)
    store_fd = descriptors[3] if len(descriptors) > 3 else None
    env.become(order["environ"], store_fd)
    work(order["program"])


def _is_alone(connection: socket.socket) -> bool:
    """Whether whoever started this process died before it could ask the kernel to die with it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _may_return_from_niceness() -> bool:
    """Whether this process may take back its priority once it has given it up; only Linux tells."""
    try:
        status = Path("/proc/self/status").read_text()
        capabilities = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
        return bool(capabilities >> _CAP_SYS_NICE & 1) or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20
    except (OSError, StopIteration, AttributeError):
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
