"""On which address the workers of several nodes can meet: found by trying, not by guessing from names."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.network_addresses import addresses

REACH_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Door:
    """A listening socket, as others see it."""

    address: str
    port: int
    interface: str
    bits_per_s: float
    """What the interface says of itself; 0 where it says nothing."""


def open_doors(interface: str | None = None) -> list[tuple[socket.socket, Door]]:
    """A listening socket on every address of this node, each on a port that was free and is now taken."""
    doors = []
    for name, address in addresses(interface):
        with suppress(OSError):  # an address may be tentative, or gone since
            listening = socket.create_server((address, 0), family=_family(address), backlog=4096)
            doors.append((listening, Door(address, listening.getsockname()[1], name, _bits_per_s(name))))
    return doors


def try_doors(doors: list[Door], interface: str | None = None) -> list[tuple[str | None, str]]:
    """For each door the own interface from which it can be reached, or None and the reason."""
    mine = {address: name for name, address in addresses(interface)}

    def attempt(door: Door) -> tuple[str | None, str]:
        try:
            with socket.create_connection((door.address, door.port), timeout=REACH_TIMEOUT_S) as connection:
                name = mine.get(connection.getsockname()[0]) or _route(door.address)
        except OSError as problem:
            return None, problem.strerror or str(problem)
        if name is None or interface not in (None, name):
            return None, f"the way there leads through {name or 'an unknown interface'}"
        return name, ""

    with ThreadPoolExecutor(max_workers=max(1, len(doors))) as pool:
        return list(pool.map(attempt, doors))


def _route(address: str) -> str | None:
    """The interface of the route to an IPv4 address; an interface may have more addresses than it tells."""
    if ":" in address or address.startswith("127."):
        return None
    wanted = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return None
    fitting = [(int(row[7], 16).bit_count(), row[0]) for row in rows if wanted & int(row[7], 16) == int(row[1], 16)]
    return max(fitting)[1] if fitting else None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _bits_per_s(interface: str) -> float:
    try:
        return max(0.0, float(Path(f"/sys/class/net/{interface}/speed").read_text()) * 1e6)
    except (OSError, ValueError):
        return 0.0
