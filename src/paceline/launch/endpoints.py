"""Finds an address of the first node that all other nodes reach: by connecting, not by guessing from names."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.network_addresses import addresses

TRY_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Endpoint:
    """An address of a node on which two sockets listen."""

    address: str
    port: int
    """The port of the rendezvous of Paceline's workers."""
    torch_port: int
    """The port of the rendezvous of workers of other programs."""
    interface: str
    bits_per_s: float
    """The speed that the interface reports; 0 if it reports none."""


@dataclass(frozen=True)
class OpenEndpoint:
    """An endpoint of this node, with its sockets."""

    endpoint: Endpoint
    store: socket.socket
    torch_store: socket.socket

    def close(self) -> None:
        self.store.close()
        self.torch_store.close()


def listen(address: str) -> socket.socket:
    """A listening socket on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def open_endpoints(interface: str | None = None) -> list[OpenEndpoint]:
    """Open one endpoint on every address of this node."""
    endpoints = []
    for name, address in addresses(interface):
        with suppress(OSError):  # an address may be tentative, or gone since
            store, torch_store = listen(address), listen(address)
            ports = store.getsockname()[1], torch_store.getsockname()[1]
            endpoints.append(OpenEndpoint(Endpoint(address, *ports, name, _bits_per_s(name)), store, torch_store))
    return endpoints


def try_endpoints(endpoints: list[Endpoint], interface: str | None = None) -> list[tuple[str | None, str]]:
    """For each endpoint, the interface of this node from which it can be reached, or None and the reason."""
    mine = {address: name for name, address in addresses(interface)}

    def attempt(endpoint: Endpoint) -> tuple[str | None, str]:
        try:
            with socket.create_connection((endpoint.address, endpoint.port), timeout=TRY_TIMEOUT_S) as connection:
                name = mine.get(connection.getsockname()[0]) or _route(endpoint.address)
        except OSError as problem:
            return None, problem.strerror or str(problem)
        if name is None or interface not in (None, name):
            return None, f"the way there leads through {name or 'an unknown interface'}"
        return name, ""

    with ThreadPoolExecutor(max_workers=max(1, len(endpoints))) as pool:
        return list(pool.map(attempt, endpoints))


def _route(address: str) -> str | None:
    """The network interface of the route to an IPv4 address; an interface may have more addresses than it lists."""
    if ":" in address or address.startswith("127."):
        return None
    wanted = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return None
    fitting = [(int(row[7], 16).bit_count(), row[0]) for row in rows if wanted & int(row[7], 16) == int(row[1], 16)]
    return max(fitting)[1] if fitting else None


def _bits_per_s(interface: str) -> float:
    try:
        return max(0.0, float(Path(f"/sys/class/net/{interface}/speed").read_text()) * 1e6)
    except (OSError, ValueError):
        return 0.0
