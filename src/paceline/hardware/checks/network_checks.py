"""Names, interfaces and ports of a node."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from paceline.hardware.checks.finding import Finding, error, ok, warning, words
from paceline.hardware.checks.system import read

T = TypeVar("T")

SLOW_LOOKUP_S = 1.0
"""A name server that does not answer costs 5 s a try (resolv.conf(5), timeout); one that does, milliseconds."""
LOOKUP_LIMIT_S = 15.0
TORCHRUN_PORT = 29500
MIN_PORTS = 1000
"""Every pair of workers holds a few connections."""


@dataclass(frozen=True)
class Interface:
    """One network interface, as sysfs has it."""

    name: str
    is_up: bool
    mtu: int
    bits_per_s: float | None = None
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """How a name becomes an address, and the address a name again."""

    name: str
    addresses: tuple[str, ...] = ()
    forward_s: float = 0.0
    reverse_s: float = 0.0
    problem: str = ""
    """Why there is no address."""


@dataclass(frozen=True)
class NetworkFacts:
    """What a node knows of its network."""

    interfaces: tuple[Interface, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    """What GLOO_SOCKET_IFNAME and its like say."""
    own_name: Lookup | None = None
    peers: tuple[Lookup, ...] = ()
    routes: dict[str, str] = field(default_factory=dict)
    """The interface that leads to each peer; empty where none does."""
    rdma_ports: dict[str, str] = field(default_factory=dict)
    """The state of each port, {"mlx5_0/1": "ACTIVE"}."""
    num_ports: int | None = None
    """That the system may give out; None: not known."""
    is_torchrun_port_free: bool = True

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)


def collect_network(
    addresses: Sequence[tuple[str, str]],
    variables: Mapping[str, str],
    peers: Sequence[str] = (),
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> NetworkFacts:
    """Look around.

    Args:
        addresses: (interface, address) of this node.
        variables: those of the environment that name interfaces.
        peers: names or addresses of the other nodes.
    """
    folder = sys / "class/net"
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    lookups = tuple(look_up(peer) for peer in peers)
    low, _, high = read(proc / "sys/net/ipv4/ip_local_port_range").replace("\t", " ").partition(" ")
    return NetworkFacts(
        interfaces=tuple(_interface(folder / name, addresses) for name in names),
        variables=dict(variables),
        own_name=look_up(socket.gethostname()),
        peers=lookups,
        routes={lookup.name: route(lookup.addresses[:1], addresses) for lookup in lookups},
        rdma_ports=_rdma_ports(sys / "class/infiniband"),
        num_ports=int(high) - int(low) + 1 if low.strip().isdigit() and high.strip().isdigit() else None,
        is_torchrun_port_free=is_free(TORCHRUN_PORT),
    )


def _interface(folder: Path, addresses: Sequence[tuple[str, str]]) -> Interface:
    speed = read(folder / "speed")  # Mbit/s; -1 where there is no link
    state = read(folder / "operstate")  # loopback and tunnels say "unknown"
    return Interface(
        name=folder.name,
        is_up=state == "up" or (state == "unknown" and read(folder / "carrier") != "0"),
        mtu=int(read(folder / "mtu") or 0),
        bits_per_s=float(speed) * 1e6 if speed.isdigit() else None,
        addresses=tuple(address for name, address in addresses if name == folder.name),
    )


def _rdma_ports(folder: Path) -> dict[str, str]:
    """State files read such as "4: ACTIVE"."""
    ports = sorted(folder.glob("*/ports/*")) if folder.is_dir() else []
    return {f"{port.parts[-3]}/{port.name}": read(port / "state").rpartition(": ")[2] for port in ports}


def look_up(name: str, limit_s: float = LOOKUP_LIMIT_S) -> Lookup:
    """Ask for the addresses of `name` and for the name of the first of them, and time both."""
    host = name.rpartition("@")[2]
    forward_s, answer = _timed(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), limit_s)
    if not isinstance(answer, list):
        return Lookup(name, forward_s=forward_s, problem=str(answer))
    sockaddrs = [entry[4] for entry in answer]
    reverse_s, _ = _timed(lambda: socket.getnameinfo(sockaddrs[0], 0), limit_s)
    return Lookup(name, tuple(dict.fromkeys(str(sockaddr[0]) for sockaddr in sockaddrs)), forward_s, reverse_s)


def _timed(action: Callable[[], T], limit_s: float) -> tuple[float, T | OSError]:
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
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((address, 9))
                source = asking.getsockname()[0]
        except OSError:
            return ""
        if source == address or source.startswith("127.") or source == "::1":
            return "lo"
        return next((name for name, mine in own if mine == source), "")
    return ""


def is_free(port: int) -> bool:
    """Whether a program of this node could listen on the port of every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(("", port))
        except OSError:
            return False
    return True


def check_network(facts: NetworkFacts, num_nodes: int = 1) -> list[Finding]:
    """Everything about names, interfaces and ports.

    Args:
        num_nodes: nodes of the run; alone, a node talks to itself through loopback and needs no name.
    """
    return [
        *(check_own_name(facts.own_name, facts.interfaces, num_nodes) if facts.own_name else []),
        *(finding for peer in facts.peers for finding in check_peer(peer, facts.routes.get(peer.name, ""))),
        *check_variables(
            facts.variables, [interface.name for interface in facts.interfaces if interface.is_up], num_nodes
        ),
        *check_rdma(facts.rdma_ports),
        *check_ports(facts.num_ports, is_torchrun_port_free=facts.is_torchrun_port_free),
    ]


def check_own_name(lookup: Lookup, interfaces: Sequence[Interface], num_nodes: int = 1) -> list[Finding]:
    """Gloo and Python's rendezvous look the node's own name up; 127.0.1.1, which Debian puts into /etc/hosts, then
    tells the other nodes to look for it on themselves."""
    check = "own name"
    address = next((address for interface in interfaces if interface.is_up for address in interface.addresses), "")
    hosts_line = f"echo '{address or 'ADDRESS'} {lookup.name}' | sudo tee -a /etc/hosts"
    if not lookup.addresses:
        found = error if num_nodes > 1 else warning
        return found(check, f"This node's own name {lookup.name} has no address: {lookup.problem}.", hosts_line)
    if num_nodes > 1 and all(is_loopback(one) for one in lookup.addresses):
        return error(
            check,
            f"This node's own name {lookup.name} means {lookup.addresses[0]}, where no other node can reach it.",
            f"In /etc/hosts replace {lookup.addresses[0]} by {address or 'its address'} on the line of {lookup.name}.",
        )
    return check_lookup_times(check, lookup, hosts_line) or ok(
        check, f"This node's own name {lookup.name} means {lookup.addresses[0]}, found at once both ways."
    )


def check_peer(lookup: Lookup, interface: str) -> list[Finding]:
    """Whether another node has an address, found at once, with a way there."""
    check = f"way to {lookup.name}"
    if not lookup.addresses:
        return error(
            check,
            f"The name {lookup.name} has no address here: {lookup.problem}.",
            f"Check its spelling, or: echo 'ADDRESS {lookup.name}' | sudo tee -a /etc/hosts",
        )
    address = lookup.addresses[0]
    slow = check_lookup_times(check, lookup, f"echo '{address} {lookup.name}' | sudo tee -a /etc/hosts")
    if interface == "lo":
        return error(
            check,
            f"The name {lookup.name} means this node itself here ({address}).",
            f"In /etc/hosts give {lookup.name} the address that other nodes reach it at.",
        )
    if not interface:
        return slow + error(
            check,
            f"No interface of this node leads to {lookup.name} ({address}).",
            f"See why: ip route get {address}",
        )
    if is_bridge(interface):
        return slow + error(
            check,
            f"The way to {lookup.name} ({address}) leads into {interface}, a network of containers on this node.",
            "Use an address of the node in the network that all nodes share.",
        )
    return slow or ok(check, f"{interface} leads to {lookup.name} ({address}).")


def check_lookup_times(check: str, lookup: Lookup, fix: str) -> list[Finding]:
    findings = []
    for seconds, what in (
        (lookup.forward_s, f"the address of {lookup.name}"),
        (lookup.reverse_s, f"the name of {', '.join(lookup.addresses[:1])}"),
    ):
        if seconds > SLOW_LOOKUP_S:
            findings += warning(
                check,
                f"It took {seconds:.1f} s to find {what}: a name server does not answer, and every connection of a "
                "run waits for it.",
                fix,
            )
    return findings


def check_variables(variables: Mapping[str, str], up: Sequence[str], num_nodes: int = 1) -> list[Finding]:
    """An interface that the environment names, which Gloo and NCCL then use whatever it is.

    Args:
        up: the interfaces that are up.
    """
    findings: list[Finding] = []
    for variable, value in variables.items():
        chosen = (
            matching(value, up) if variable.startswith("NCCL") else [name for name in value.split(",") if name in up]
        )
        if not chosen:
            findings += error(
                variable,
                f"{variable}={value} names no interface of this node that is up; there are {words(list(up), 8)}.",
                f"unset {variable}, or name one of them",
            )
        elif num_nodes > 1 and all(name == "lo" or is_bridge(name) for name in chosen):
            findings += error(
                variable,
                f"{variable}={value} sends workers to {chosen[0]}, where no other node is.",
                f"unset {variable}",
            )
    named = " and ".join(variables)
    return findings or ok(
        "interface", f"{named} name an interface that is up." if named else "No variable forces an interface."
    )


def matching(value: str, names: Sequence[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME means: prefixes, or exact names after =, or all others after ^.

    As NCCL's guide has it, "Environment Variables": "eth", "=eth0", "^docker,lo", "^=docker0".
    """
    is_excluding, is_exact = value.startswith("^"), "=" in value[:2]
    wanted = [part for part in re.sub(r"^\^?=?", "", value).split(",") if part]

    def is_meant(name: str) -> bool:
        return name in wanted if is_exact else any(name.startswith(part) for part in wanted)

    return [name for name in names if is_meant(name) != is_excluding]


def check_rdma(ports: Mapping[str, str]) -> list[Finding]:
    check = "RDMA ports"
    down = [port for port, state in ports.items() if state != "ACTIVE"]
    if not ports:
        return ok(check, "There are no RDMA cards: nodes talk over sockets.")
    if down:
        return warning(
            check,
            f"{len(down)} of {len(ports)} RDMA ports carry nothing: {words(down)}.",
            "Check cable and switch (ibstat), or leave them out: NCCL_IB_HCA=^"
            + ",".join(p.split("/")[0] for p in down),
        )
    return ok(check, f"All {len(ports)} RDMA ports are active.")


def check_ports(num_ports: int | None, *, is_torchrun_port_free: bool) -> list[Finding]:
    check = "free ports"
    findings: list[Finding] = []
    if num_ports is not None and num_ports < MIN_PORTS:
        findings += warning(
            check,
            f"The system gives out only {num_ports} ports; workers hold a few for every pair.",
            "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    if not is_torchrun_port_free:
        findings += warning(
            check,
            f"Port {TORCHRUN_PORT}, which torchrun takes unless told otherwise, is in use.",
            "Start with paceline launch, which binds a free one, or give torchrun --standalone.",
        )
    return findings or ok(check, f"There are ports to be had, {TORCHRUN_PORT} among them.")


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def is_bridge(interface: str) -> bool:
    """Networks that containers and virtual machines of one node share; NCCL leaves out docker* and lo by itself."""
    return interface.startswith(("docker", "virbr", "br-", "cni", "podman", "lxcbr"))
