"""Process groups that admit nobody else: Gloo authenticates no connection, so the kernel has to.

Each of Gloo's groups listens on a port of its own for as long as it exists, although all members are connected once it
is made. From then on the kernel drops every packet that reaches the port (a classic BPF program on the listening
socket, which needs no rights). Before, a stranger can connect, and take the place of a member whose connection comes
later: of connections inside this node the kernel knows whose they are, and such a group is not used.

Linux only; elsewhere, and where /proc is hidden, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""From <asm-generic/socket.h> and <linux/filter.h>: the instruction "return 0", which accepts no byte."""
_LISTENS = "0A"
"""A state of <net/tcp_states.h>."""


@dataclass(frozen=True)
class _Connection:
    """A row of the kernel's table of TCP sockets."""

    local: str
    remote: str
    state: str
    uid: int
    inode: str


class StrangerError(LaunchError):
    """A process of another user connected while the members of a group connected to each other."""


@contextlib.contextmanager
def private_group() -> Iterator[None]:
    """While the block is open, all members make one or more groups; then their ports are closed.

    Raises:
        StrangerError: a process of another user has connected, perhaps in the place of a member: the groups must
            not be used.
    """
    before = set(_own_sockets())
    yield
    own = _own_sockets()
    table = _tcp_table({_family(own[inode]) for inode in own.keys() - before})
    new = [row for row in table if row.inode in own and row.inode not in before]
    listening = [row for row in new if row.state == _LISTENS]
    if not listening:
        return
    for row in listening:
        refuse_connections(own[row.inode])
    # A row without an inode is a member's that has not accepted the connection yet, and a connection that has no far
    # end here leads to another node.
    owners = {(row.local, row.remote): row.uid for row in table if row.inode != "0"}
    strangers = {owners.get((row.remote, row.local), os.getuid()) for row in new} - {os.getuid()}
    if strangers:
        raise StrangerError(
            f"A process of user {min(strangers)} on this node connected while workers connected to each other; nothing "
            "was exchanged with it: start the run again, in a network namespace of its own if that user goes on (see "
            "docs/security.md)."
        )


def refuse_connections(descriptor: int) -> None:
    """Have the kernel drop what arrives at a listening socket; connections that it has accepted stay."""
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listening:
        # struct sock_fprog: the number of instructions, and where they are
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _own_sockets() -> dict[str, int]:
    """This process's sockets: a descriptor of each, by inode."""
    found = {}
    with contextlib.suppress(OSError), os.scandir("/proc/self/fd") as entries:
        for descriptor in [int(entry.name) for entry in entries]:
            with contextlib.suppress(OSError):  # closed by now
                facts = os.fstat(descriptor)
                if stat.S_ISSOCK(facts.st_mode):
                    found[str(facts.st_ino)] = descriptor
    return found


def _family(descriptor: int) -> int | None:
    """The address family of a socket; None: it is closed by now."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family
    return None


def _tcp_table(families: Set[int | None]) -> list[_Connection]:
    """All TCP sockets of these address families in this network namespace.

    The kernel goes through all of its hash table for each family, which takes milliseconds.
    """
    rows = []
    for family, name in (socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6"):
        if family not in families:
            continue
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                rows.append(_Connection(words[1], words[2], words[3], int(words[7]), words[9]))
    return rows
