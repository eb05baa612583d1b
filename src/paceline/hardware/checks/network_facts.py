"""Facts about names, interfaces and ports of a node."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from paceline.hardware.sources import entries, read_integer, read_text
from paceline.network_addresses import address_towards

T = TypeVar("T")

LOOKUP_LIMIT_S = 15.0
TORCHRUN_PORT = 29500


@dataclass(frozen=True)
class Interface:
    """One network interface, as sysfs has it."""

    name: str
    is_up: bool
    mtu: int
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """The addresses of a name, and how long finding them took, and finding the name of the first of them."""

    name: str
    addresses: tuple[str, ...] = ()
    forward_s: float = 0.0
    reverse_s: float = 0.0
    problem: str = ""
    """Why there is no address."""

    @property
    def is_loopback(self) -> bool:
        return all(address.startswith("127.") or address == "::1" for address in self.addresses)


@dataclass(frozen=True)
class NetworkFacts:
    """Names, interfaces and ports of a node."""

    interfaces: tuple[Interface, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that name interfaces, such as GLOO_SOCKET_IFNAME."""
    own_name: Lookup | None = None
    peers: tuple[Lookup, ...] = ()
    routes: dict[str, str] = field(default_factory=dict)
    """The interface that leads to each peer; empty where none does."""
    rdma_ports: dict[str, str] = field(default_factory=dict)
    """The state of each port, {"mlx5_0/1": "ACTIVE"}."""
    num_ports: int | None = None
    """Ports that the system may assign; None: not known."""
    is_torchrun_port_free: bool = True

    @property
    def idle_rdma_ports(self) -> list[str]:
        return [port for port, state in self.rdma_ports.items() if state != "ACTIVE"]

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)


def collect_network(
    addresses: Sequence[tuple[str, str]], variables: Mapping[str, str], peers: Sequence[str]
) -> NetworkFacts:
    """Collect the facts of this node.

    Args:
        addresses: (interface, address) of this node.
        variables: those of the environment that name interfaces.
        peers: names or addresses of the other nodes.
    """
    lookups = tuple(look_up(peer) for peer in peers)
    low, _, high = read_text(Path("/proc/sys/net/ipv4/ip_local_port_range")).replace("\t", " ").partition(" ")
    return NetworkFacts(
        interfaces=tuple(_interface(entry, addresses) for entry in entries(Path("/sys/class/net")) if entry.is_dir()),
        variables=dict(variables),
        own_name=look_up(socket.gethostname()),
        peers=lookups,
        routes={lookup.name: route(lookup.addresses, addresses) for lookup in lookups},
        rdma_ports=_rdma_ports(Path("/sys/class/infiniband")),
        num_ports=int(high) - int(low) + 1 if low.strip().isdigit() and high.strip().isdigit() else None,
        is_torchrun_port_free=is_free(TORCHRUN_PORT),
    )


def _interface(folder: Path, addresses: Sequence[tuple[str, str]]) -> Interface:
    state = read_text(folder / "operstate")  # loopback and tunnels say "unknown"
    return Interface(
        name=folder.name,
        is_up=state == "up" or (state == "unknown" and read_text(folder / "carrier") != "0"),
        mtu=read_integer(folder / "mtu") or 0,
        addresses=tuple(address for name, address in addresses if name == folder.name),
    )


def _rdma_ports(folder: Path) -> dict[str, str]:
    """The state of each RDMA port, from files with texts such as "4: ACTIVE"."""
    ports = sorted(folder.glob("*/ports/*"))
    return {f"{port.parts[-3]}/{port.name}": read_text(port / "state").rpartition(": ")[2] for port in ports}


def look_up(name: str) -> Lookup:
    """Ask for the addresses of `name` and for the name of the first of them, and time both."""
    hostname = name.rpartition("@")[2]
    forward_s, answer = _timed(lambda: socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM))
    if not isinstance(answer, list):
        return Lookup(name, forward_s=forward_s, problem=str(answer))
    sockaddrs = [entry[4] for entry in answer]
    reverse_s, _ = _timed(lambda: socket.getnameinfo(sockaddrs[0], 0))
    return Lookup(name, tuple(dict.fromkeys(str(sockaddr[0]) for sockaddr in sockaddrs)), forward_s, reverse_s)


def _timed(action: Callable[[], T], limit_s: float = LOOKUP_LIMIT_S) -> tuple[float, T | OSError]:
    """Seconds and the answer, or the error. A name server's silence cannot be interrupted, only left behind."""
    answers: list[T | OSError] = []

    def ask() -> None:
        try:
            answers.append(action())
        except OSError as problem:
            answers.append(problem)

    asking = threading.Thread(target=ask, daemon=True)
    began = time.perf_counter()
    asking.start()
    asking.join(limit_s)
    seconds = time.perf_counter() - began
    return seconds, answers[0] if answers else OSError(f"no answer in {limit_s:g} s")


def route(addresses: Sequence[str], own: Sequence[tuple[str, str]]) -> str:
    """The interface through which this node would send to the first of `addresses`; nothing is sent.

    Returns:
        Its name; "lo" for an address of this node itself, empty where there is no way.
    """
    if not addresses:
        return ""
    try:
        source = address_towards(addresses[0])
    except OSError:
        return ""
    if source == addresses[0] or source.startswith("127.") or source == "::1":
        return "lo"
    return next((name for name, mine in own if mine == source), "")


def is_free(port: int) -> bool:
    """Whether a program of this node could listen on the port of every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(("", port))
        except OSError:
            return False
    return True


def chosen_interfaces(variable: str, value: str, names: Sequence[str]) -> list[str]:
    """The interfaces among `names` that a variable such as GLOO_SOCKET_IFNAME means.

    NCCL_SOCKET_IFNAME has prefixes, or exact names after =, or all others after ^, as NCCL's guide has it
    ("Environment Variables"): "eth", "=eth0", "^docker,lo", "^=docker0". All others are lists of names.
    """
    if not variable.startswith("NCCL"):
        return [name for name in value.split(",") if name in names]
    is_excluding, is_exact = value.startswith("^"), "=" in value[:2]
    wanted = tuple(filter(None, re.sub(r"^\^?=?", "", value).split(",")))
    meant = [name for name in names if (name in wanted if is_exact else name.startswith(wanted))]
    return [name for name in names if (name in meant) != is_excluding]


def is_bridge(interface: str) -> bool:
    """Networks that containers and virtual machines of one node share; NCCL leaves out docker* and lo by itself."""
    return interface.startswith(("docker", "virbr", "br-", "cni", "podman", "lxcbr"))
