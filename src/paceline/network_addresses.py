"""The addresses of this node's network interfaces, as the kernel tells them."""

from __future__ import annotations

import socket

import psutil


def addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 or global IPv6 address) of this node's interfaces that are up; not of loopback."""
    states = psutil.net_if_stats()
    return [
        (name, one.address)
        for name, known in psutil.net_if_addrs().items()
        for one in known
        if (one.family in (socket.AF_INET, socket.AF_INET6) and name in states and states[name].isup)
        and not one.address.startswith(("127.", "::1", "fe80:"))
    ]


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
