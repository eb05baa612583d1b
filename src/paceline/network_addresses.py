"""The addresses of this node's network interfaces, as the kernel tells them."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from paceline.errors import LaunchError

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


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


def address_towards(host: str) -> str:
    """The address of this node from which it would send to `host`; nothing is sent, the kernel only chooses the route.

    Raises:
        OSError: there is no way.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(address)
        found: str = asking.getsockname()[0]
    return found


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
