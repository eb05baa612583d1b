"""Checks of names, interfaces and ports: a table of what can be wrong, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.hardware.checks.engine import Check, Problem, error, warning, words
from paceline.hardware.checks.network_facts import TORCHRUN_PORT, Lookup, NetworkFacts, chosen_interfaces, is_bridge
from paceline.hardware.checks.node_facts import NodeFacts

SLOW_LOOKUP_S = 1.0
"""A name server that does not answer costs 5 s a try (resolv.conf(5), timeout); one that does, milliseconds."""
MIN_PORTS = 1000
"""Every pair of workers holds a few connections."""


@dataclass(frozen=True)
class NodeName:
    """A node's name, its own or another's, and what this node makes of it."""

    lookup: Lookup
    hosts_address: str
    """To be put into /etc/hosts; empty where none is known."""
    has_peers: bool = False
    interface: str = ""
    """The network interface that leads to the address."""

    @property
    def name(self) -> str:
        return self.lookup.name

    @property
    def address(self) -> str:
        return next(iter(self.lookup.addresses), "")

    @property
    def hosts_line(self) -> str:
        return f"echo '{self.hosts_address or 'ADDRESS'} {self.name}' | sudo tee -a /etc/hosts"


@dataclass(frozen=True)
class _Variable:
    """An environment variable that names interfaces; Gloo and NCCL then use these and no others."""

    name: str
    value: str
    chosen: list[str]
    """The interfaces of this node that it names and that are up."""
    up: str
    """All that are up."""
    has_peers: bool


def _own_name(node: NodeFacts) -> list[NodeName] | None:
    up = [interface for interface in node.network.interfaces if interface.is_up]
    address = next((address for interface in up for address in interface.addresses), "")
    own = node.network.own_name
    return None if own is None else [NodeName(own, address, node.has_peers)]


def peer_names(node: NodeFacts) -> list[NodeName]:
    """The names of the other nodes, as this one finds them."""
    network = node.network
    return [
        NodeName(peer, next(iter(peer.addresses), ""), interface=network.routes.get(peer.name, ""))
        for peer in network.peers
    ]


def _variables(node: NodeFacts) -> list[_Variable]:
    up = [interface.name for interface in node.network.interfaces if interface.is_up]
    return [
        _Variable(name, value, chosen_interfaces(name, value, up), words(up, 8), node.has_peers)
        for name, value in node.network.variables.items()
    ]


SLOW = "a name server does not answer, and every connection of a run waits for it."
_SLOW_LOOKUPS: tuple[Problem[NodeName], ...] = (
    warning(
        lambda found: found.lookup.forward_s > SLOW_LOOKUP_S,
        "It took {lookup.forward_s:.1f} s to find the address of {name}: " + SLOW,
        "{hosts_line}",
        hides_others=False,
    ),
    warning(
        lambda found: found.lookup.reverse_s > SLOW_LOOKUP_S,
        "It took {lookup.reverse_s:.1f} s to find the name of {address}: " + SLOW,
        "{hosts_line}",
        hides_others=False,
    ),
)

# Gloo and Python's rendezvous look the node's own name up; 127.0.1.1, which Debian puts into /etc/hosts, then tells
# the other nodes to look for it on themselves.
OWN_NAME_CHECK = Check[NodeFacts, NodeName](
    "own name",
    _own_name,
    "This node's own name {network.own_name.name} means {network.own_name.addresses[0]}, found at once both ways.",
    error(
        lambda own: not own.address and own.has_peers,
        "This node's own name {name} has no address: {lookup.problem}.",
        "{hosts_line}",
    ),
    warning(
        lambda own: not own.address,
        "This node's own name {name} has no address: {lookup.problem}.",
        "{hosts_line}",
    ),
    error(
        lambda own: own.has_peers and own.lookup.is_loopback,
        "This node's own name {name} means {address}, where no other node can reach it.",
        lambda own: (
            f"In /etc/hosts replace {own.address} by {own.hosts_address or 'its address'} on the line of {own.name}."
        ),
    ),
    *_SLOW_LOOKUPS,
)

PEER_NAME_CHECK = Check[NodeName, NodeName](
    "way to {name}",
    lambda peer: [peer],
    "{interface} leads to {name} ({address}).",
    error(
        lambda peer: not peer.address,
        "The name {name} has no address here: {lookup.problem}.",
        "Check its spelling, or: {hosts_line}",
    ),
    error(
        lambda peer: peer.interface == "lo",
        "The name {name} means this node itself here ({address}).",
        "In /etc/hosts give {name} the address that other nodes reach it at.",
    ),
    *_SLOW_LOOKUPS,
    error(
        lambda peer: not peer.interface,
        "No interface of this node leads to {name} ({address}).",
        "See why: ip route get {address}",
    ),
    error(
        lambda peer: is_bridge(peer.interface),
        "The way to {name} ({address}) leads into {interface}, a network of containers on this node.",
        "Use an address of the node in the network that all nodes share.",
    ),
)
"""The check of another node's name and of the way there, once for each of them."""

NETWORK_CHECKS: tuple[Check[NodeFacts, Any], ...] = (
    Check[NodeFacts, _Variable](
        "interface",
        _variables,
        lambda node: (
            f"{' and '.join(node.network.variables)} name an interface that is up."
            if node.network.variables
            else "No variable forces an interface."
        ),
        error(
            lambda variable: not variable.chosen,
            "{name}={value} names no interface of this node that is up; there are {up}.",
            "unset {name}, or name one of them",
        ),
        error(
            lambda variable: variable.has_peers and all(name == "lo" or is_bridge(name) for name in variable.chosen),
            "{name}={value} sends workers to {chosen[0]}, where no other node is.",
            "unset {name}",
        ),
        named="{name}",
    ),
    Check[NodeFacts, NetworkFacts](
        "RDMA ports",
        lambda node: [node.network],
        lambda node: (
            f"All {len(node.network.rdma_ports)} RDMA ports are active."
            if node.network.rdma_ports
            else "There are no RDMA cards: nodes talk over sockets."
        ),
        warning(
            lambda network: network.idle_rdma_ports,
            lambda network: (
                f"{len(network.idle_rdma_ports)} of {len(network.rdma_ports)} RDMA ports carry nothing: "
                f"{words(network.idle_rdma_ports)}."
            ),
            lambda network: (
                "Check cable and switch (ibstat), or leave them out: NCCL_IB_HCA=^"
                + ",".join(port.split("/")[0] for port in network.idle_rdma_ports)
            ),
        ),
    ),
    Check[NodeFacts, NetworkFacts](
        "free ports",
        lambda node: [node.network],
        f"There are ports to be had, {TORCHRUN_PORT} among them.",
        warning(
            lambda network: network.num_ports is not None and network.num_ports < MIN_PORTS,
            "The system gives out only {num_ports} ports; workers hold a few for every pair.",
            "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
            hides_others=False,
        ),
        warning(
            lambda network: not network.is_torchrun_port_free,
            f"Port {TORCHRUN_PORT}, which torchrun takes unless told otherwise, is in use.",
            "Start with paceline launch, which binds a free one, or give torchrun --standalone.",
        ),
    ),
)
