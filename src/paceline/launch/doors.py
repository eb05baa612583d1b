"""On which address the workers of several nodes can meet: found by trying, not by guessing from names."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
REACH_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Door:
    """A listening socket, as others see it."""

    address: str
    port: int
    interface: str
    bits_per_s: float
    """What the interface says of itself; 0 where it says nothing."""


def addresses(interface: str | None = None) -> list[tuple[str, str]]:
    """(interface, IPv4 or global IPv6 address) of this node's interfaces that are up; loopback only if it is named.

    Raises:
        LaunchError: `interface` is given, and there is none of that name or it has no address.
    """
    names = [name for _, name in socket.if_nameindex() if interface in (None, name)]
    may_be_loopback = interface is not None
    found = [(name, address) for name in names if (address := _ipv4(name, may_be_loopback)) is not None]
    found += [(name, address) for name, address in _ipv6() if name in names]
    if interface is not None and not found:
        raise LaunchError(
            f"There is no interface {interface} with an address on this node; there are "
            f"{', '.join(sorted(name for _, name in socket.if_nameindex()))}."
        )
    return found


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


def _ipv4(interface: str, may_be_loopback: bool) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            (flags,) = struct.unpack_from("H", fcntl.ioctl(asking, _SIOCGIFFLAGS, request), 16)
            if not flags & _IFF_UP or (flags & _IFF_LOOPBACK and not may_be_loopback):
                return None
            return socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None  # it has none


def _ipv6() -> list[tuple[str, str]]:
    """Global addresses: scope 00 in the fourth column of the kernel's table."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] == "00"]


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
