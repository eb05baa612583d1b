"""Whether one node can connect to another, and what time it is there: one listens, the other asks.

A question is one byte; the answer is the clock of the node that answers, in seconds since the epoch, and a line's end.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

REACH_LIMIT_S = 3.0
_NUM_QUESTIONS = 3


@dataclass(frozen=True)
class ReachTest:
    """One node's attempt to connect to another."""

    source: str
    target: str
    """Names of nodes, as --hosts has them."""
    problem: str = ""
    """Why it failed; empty where it did not."""
    rtt_s: float = 0.0
    skew_s: float = 0.0
    """Seconds that the target's clock is ahead, give or take half of `rtt_s`."""


def answer_until(asked_to_end: TextIO, address: str, out: TextIO) -> None:
    """Listen on a free port of `address`, say which as a line {"port": …}, and answer until `asked_to_end` is closed.

    Raises:
        OSError: this node has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        print(json.dumps({"port": server.getsockname()[1]}), file=out, flush=True)
        while True:
            ready, _, _ = select.select([server.fileno(), asked_to_end.fileno()], [], [])
            if asked_to_end.fileno() in ready and not asked_to_end.readline():
                return
            if server.fileno() in ready:
                with suppress(OSError):
                    _answer(server)


def _answer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(REACH_LIMIT_S)
        while connection.recv(1):
            connection.sendall(f"{time.time()!r}\n".encode())


def try_to_reach(targets: Sequence[tuple[str, str, int]]) -> list[ReachTest]:
    """Connect to each of `targets`, (name, address, port), all at once; the results have no `source` yet."""

    def attempt(target: tuple[str, str, int]) -> ReachTest:
        name, address, port = target
        try:
            rtt_s, skew_s = _ask_time(address, port)
        except (OSError, ValueError) as problem:
            return ReachTest("", name, problem=getattr(problem, "strerror", None) or str(problem))
        return ReachTest("", name, rtt_s=rtt_s, skew_s=skew_s)

    with ThreadPoolExecutor(max_workers=max(1, min(32, len(targets)))) as pool:
        return list(pool.map(attempt, targets))


def _ask_time(address: str, port: int) -> tuple[float, float]:
    """Seconds there and back, and how far the other clock is ahead: of the quickest answer, as NTP does (RFC 5905)."""
    answers = []
    with socket.create_connection((address, port), timeout=REACH_LIMIT_S) as connection:
        lines = connection.makefile("rb")
        for _ in range(_NUM_QUESTIONS):
            sent_at = time.time()
            began = time.perf_counter()
            connection.sendall(b"?")
            theirs = float(lines.readline())
            rtt_s = time.perf_counter() - began
            answers.append((rtt_s, theirs - (sent_at + rtt_s / 2)))
    return min(answers)
