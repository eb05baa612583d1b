"""Does a local command carry the standard input and output of a program on another node, and does it leave nothing?

    check_stdio(node, argv_of(echo_program()))

`echo` says where it runs and then repeats its input until that ends. The client, on the node that would launch, is a
process of this file too, since programs on a node are started without pipes.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.kit.nodes.cluster import Node  # the programs of this file find no package of tests

VARIABLE = "STDIO_TEST"
NUM_BYTES = 300_000


@dataclass(frozen=True)
class Place:
    """Where an echo ran."""

    hostname: str
    pid: int
    """As its node counts."""
    cwd: str
    variable: str
    """The value of `VARIABLE` there."""


def echo_program(mark: str = "") -> tuple[str, ...]:
    """A program that repeats its input; `mark` tells it from others in a list of processes."""
    return (sys.executable, "-S", str(Path(__file__).resolve()), "echo", mark)


def talk(node: Node, argv: Sequence[str], *, timeout_s: float) -> Place:
    """Run `argv`, which ends in an echo, on `node`: lines come back at once, all bytes come back, its end ends it."""
    client = node.exec([sys.executable, __file__, "talk", json.dumps(argv)], cwd=Path(__file__).parents[3])
    assert client.wait(timeout_s) == 0, client.output
    return Place(**json.loads(client.stdout))


def orphan(node: Node, argv: Sequence[str], *, timeout_s: float) -> Place:
    """Run `argv`, which ends in an echo, on `node`, and kill the local command by SIGKILL while the echo runs."""
    client = node.exec([sys.executable, __file__, "orphan", json.dumps(argv)], cwd=Path(__file__).parents[3])
    assert client.wait(timeout_s) == 0, client.output
    return Place(**json.loads(client.stdout))


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def commands_on(node: Node) -> list[str]:
    """The command lines of all processes of a node, but for those that look."""
    listing = node.exec(["sh", "-c", "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2> /dev/null"])
    listing.wait(10.0)
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]


def _echo() -> None:
    place = Place(socket.gethostname(), os.getpid(), str(Path.cwd()), os.environ.get(VARIABLE, ""))
    _write(1, (json.dumps(vars(place)) + "\n").encode())
    while data := os.read(0, 1 << 16):
        _write(1, data)


def _talk(argv: Sequence[str]) -> None:
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        place = process.stdout.readline()
        for line in (b"first\n", b"second\n"):  # the second waits for the first one's echo
            _write(process.stdin.fileno(), line)
            answer = process.stdout.readline()
            assert answer == line, answer
        sent = random.Random(0).randbytes(NUM_BYTES)
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(process.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        _write(process.stdin.fileno(), sent)
        process.stdin.close()
        reader.join()
        assert received == [sent], f"{len(received[0])} bytes of {len(sent)} came back, or others"
        assert process.wait() == 0, process.returncode
    sys.stdout.buffer.write(place)


def _orphan(argv: Sequence[str]) -> None:
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        place = process.stdout.readline()
        process.kill()
    sys.stdout.buffer.write(place)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        _echo()
    elif sys.argv[1] == "talk":
        _talk(json.loads(sys.argv[2]))
    else:
        _orphan(json.loads(sys.argv[2]))
