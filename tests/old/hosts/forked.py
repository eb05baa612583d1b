"""Workers on nodes that are forked from a process that has loaded torch, for tests of what they do and not of how they
are started.

    with forked_python(folder) as python:
        cluster.nodes[0].exec([..., "paceline", "launch", "--hosts", "node0,node1", "--python", python, ...])
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

from paceline.launch.worker import run_program
from tests.kit.nodes.cluster import Cluster, fork_on, move_to, places_of
from tests.kit.workers import run_ranks
from tests.old.ranks.forked_commands import paceline_on_path

FORKED = "multiprocessing.forkserver"
"""What stands in the command of every forked process."""

_CREDENTIALS = struct.Struct("3i")
"""Of the process at the other end of a socket: its pid as this process counts, user and group (unix(7))."""


@contextlib.contextmanager
def forked_python(folder: Path) -> Iterator[str]:
    """A Python for the agents of any launcher: it has loaded torch, and so have the workers that agents start."""
    with paceline_on_path(folder, "python", _beside) as bin_folder:
        yield str(bin_folder / "python")


def _beside(connection: socket.socket) -> None:
    pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    move_to(pid)


def fork_on_nodes(
    cluster: Cluster, workers_per_node: Sequence[int], program: Sequence[str], *, timeout_s: float
) -> list[str]:
    """As `run_on_nodes`."""
    places = [(node.init_pid, variables) for node, variables in places_of(cluster, workers_per_node)]
    return run_ranks(_said_on_node, len(places), places, program, timeout_s=timeout_s)


def _said_on_node(places: list[tuple[int, dict[str, str]]], program: Sequence[str]) -> str:
    init_pid, variables = places[int(os.environ["RANK"])]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = fork_on(init_pid)
        if child == 0:
            _run(program, variables, stdout, stderr)
        _, status = os.waitpid(child, 0)
        stdout.seek(0)
        stderr.seek(0)
        assert status == 0, f"exited with {os.waitstatus_to_exitcode(status)}\n{stderr.read()}"
        return stdout.read()


def _run(program: Sequence[str], variables: dict[str, str], stdout: IO[str], stderr: IO[str]) -> NoReturn:
    """Be that program, to its end."""
    exit_code = 1
    try:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        del os.environ["PACELINE_RENDEZVOUS"]
        os.environ.update(variables)
        run_program(program)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
