"""Which links to time, and what a timing says about the links like it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from paceline.spec import Link, Node

MOST_NODES_IN_FULL = 4
"""Up to so many nodes every pair is timed; beyond, timing all pairs would take too long."""


def links_to_time(node: Node) -> list[Link]:
    """The first link of every label between two devices of `node`."""
    first: dict[str, Link] = {}
    for link in _between_devices(node):
        first.setdefault(link.label, link)
    return list(first.values())


def with_measured(node: Node, measured: Sequence[Link]) -> Node:
    """`node` with measured links in place of its own of the same label, or beside them where it has none.

    Links of one label are of one kind, so one measurement speaks for all of them between devices.
    """
    by_label = {link.label: link for link in measured}
    between_devices = _between_devices(node)
    links = [
        dataclasses.replace(by_label[link.label], ends=link.ends)
        if link.label in by_label and link in between_devices
        else link
        for link in node.links
    ]
    known = {link.label for link in between_devices}
    return dataclasses.replace(node, links=(*links, *(link for link in measured if link.label not in known)))


def _between_devices(node: Node) -> list[Link]:
    devices = {device.label for device in node.devices}
    return [link for link in node.links if devices.issuperset(link.ends)]


def node_pairs(num_nodes: int) -> list[tuple[int, int]]:
    """Pairs of nodes to time, each once with the lower number first.

    All of them up to `MOST_NODES_IN_FULL` nodes; beyond, a ring of neighbours, and each node with the one that stands
    opposite in it, often in another rack (of an odd number of nodes one has none).
    """
    if num_nodes <= MOST_NODES_IN_FULL:
        return list(itertools.combinations(range(num_nodes), 2))
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    opposite = [(node, node + num_nodes // 2) for node in range(num_nodes // 2)]
    return [(min(pair), max(pair)) for pair in (*ring, *opposite)]


def merged_reasons(by_node: Mapping[str, Sequence[str]]) -> list[str]:
    """Each reason for not measuring something once, with its nodes in front where there are several nodes."""
    if len(by_node) == 1:
        return [reason for reasons in by_node.values() for reason in reasons]
    hostnames: dict[str, list[str]] = {}
    for hostname, reasons in by_node.items():
        for reason in reasons:
            hostnames.setdefault(reason, []).append(hostname)
    return [
        f"{'every node' if len(names) == len(by_node) else ', '.join(names)}: {reason}"
        for reason, names in hostnames.items()
    ]
