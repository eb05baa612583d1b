"""Which devices of a node should work together, and in which order around the ring.

A ring all_reduce is as fast as its slowest link, so the K devices are those whose best ring has the highest bottleneck
bandwidth. In full, the first that tells two choices apart decides:

1. No two of the chosen are joined by SYS, the link between sockets, if K devices without such a pair exist. This comes
   before bandwidth: other collectives (all_to_all, trees, halving and doubling) use more pairs than those of the ring.
2. No link of the ring is SYS, if K devices with such a ring exist.
3. The highest bottleneck bandwidth.
4. The highest sum of bandwidth around the ring.
5. The fewest NUMA nodes.
6. The shortest way from any of them to a network card: by label, then by bandwidth.
7. The lowest ids, compared in ascending order.

Of the rings over the chosen devices that 1 to 4 leave, it is the first one in the order of ids, from the lowest id
towards the smaller of its two neighbours. A ring of two is a pair.

Links with unknown bandwidth come after all others, in the order of their labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from paceline.errors import ClusterError
from paceline.spec import Node
from paceline.spec.cluster import DeviceChoice, DeviceRing, Link
from paceline.words import number_of

_MOST_RINGS = 10_000
"""So many rings are all tried, as over any of 8 devices or 4 of 16; of more a good one is looked for."""
_NUM_CLIMBS = 4
"""Rings that are improved where not all are tried: those that begin best."""

ACROSS_SOCKETS = "SYS"
_NEARNESS = {ACROSS_SOCKETS: 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5}
"""The nearness of the ends of a PCIe label; NVLink and the like are nearer, and an unknown label is 0."""


def pick(node: Node, num_devices: int, allowed: Sequence[int] | None = None) -> DeviceChoice:
    """The `num_devices` devices of a node with the best ring, by the order at the top of this module.

    Args:
        allowed: Indices of the devices to choose among; None: all of the node.

    Raises:
        ClusterError: fewer devices than asked for.
    """
    graph = _Graph.of(node, allowed)
    present = len(graph.devices)
    if not 1 <= num_devices <= present:
        raise ClusterError(
            f"{num_devices} devices cannot be chosen: {node.hostname or 'the node'} has "
            f"{number_of(present, 'device')} to choose from."
        )
    num_rings = math.comb(present, num_devices) * max(1, math.factorial(num_devices - 1) // 2)
    is_exact = graph.is_uniform or num_rings <= _MOST_RINGS
    if num_devices == 1 or graph.is_uniform:
        ring = _lowest(graph, num_devices)
    elif is_exact:
        ring = max(_rings(present, num_devices), key=graph.rank)  # of equal ones the first
    else:
        ring = _good_ring(graph, num_devices)
    return DeviceChoice(graph.ring(ring), graph.ring(range(num_devices)), is_exact)


@dataclass(frozen=True)
class _Graph:
    """The devices to choose among, as vertices 0 … n - 1 in the order of their ids."""

    devices: tuple[int, ...]
    links: tuple[tuple[Link | None, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    """[vertex][vertex]: bytes/s of the link in whole numbers, which add up exactly; the larger the better."""
    crossing: tuple[int, ...]
    """[vertex]: the vertices that SYS joins it with, as bits."""
    numa_nodes: tuple[int | None, ...]
    nic_nearness: tuple[tuple[int, float], ...]
    """[vertex]: nearness of the label and weight of the shortest path to a network card."""

    @classmethod
    def of(cls, node: Node, allowed: Sequence[int] | None) -> _Graph:
        chosen = {device.index: device for device in node.devices if allowed is None or device.index in allowed}
        devices = [chosen[index] for index in sorted(chosen)]
        nics = [peripheral.label for peripheral in node.peripherals]
        by_ends = {frozenset(link.ends): link for link in node.links}
        links = [[by_ends.get(frozenset((one.label, other.label))) for other in devices] for one in devices]
        ways = [[by_ends.get(frozenset((device.label, nic))) for nic in nics] for device in devices]
        return cls(
            devices=tuple(device.index for device in devices),
            links=tuple(map(tuple, links)),
            weights=tuple(tuple(map(weight, row)) for row in links),
            crossing=tuple(sum(1 << place for place, link in enumerate(row) if _crosses(link)) for row in links),
            numa_nodes=tuple(device.numa_node for device in devices),
            nic_nearness=tuple(max(((_nearness(way), weight(way)) for way in row), default=(0, 0.0)) for row in ways),
        )

    @property
    def is_uniform(self) -> bool:
        """Whether no pair of devices is better than another."""
        pairs = list(combinations(range(len(self.devices)), 2))
        return len({(self.weights[one][other], self.crosses(one, other)) for one, other in pairs}) < 2

    def crosses(self, one: int, other: int) -> bool:
        return bool(self.crossing[one] >> other & 1)

    def place_rank(self, vertices: Sequence[int]) -> tuple[int, tuple[int, float], list[int]]:
        """What 5 to 7 compare, the larger the better."""
        num_numa_nodes = len({self.numa_nodes[vertex] for vertex in vertices})
        nearest = max(self.nic_nearness[vertex] for vertex in vertices)
        return -num_numa_nodes, nearest, [-vertex for vertex in sorted(vertices)]

    def rank(self, ring: Sequence[int]) -> tuple[object, ...]:
        """What 1 to 7 compare, for one ring or pair, the larger the better."""
        hops = list(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        weights = [self.weights[one][other] for one, other in hops]
        return (
            not any(self.crosses(one, other) for one, other in combinations(ring, 2)),
            not any(self.crosses(one, other) for one, other in hops),
            min(weights),
            sum(weights),
            *self.place_rank(ring),
        )

    def ring(self, vertices: Sequence[int]) -> DeviceRing:
        hops = [(one, other) for one, other in zip(vertices, [*vertices[1:], *vertices[:1]], strict=True)]
        slowest = min(hops, key=lambda hop: (self.weights[hop[0]][hop[1]], not self.crosses(*hop)))
        is_alone = len(vertices) == 1
        return DeviceRing(
            tuple(self.devices[vertex] for vertex in vertices),
            None if is_alone else self.links[slowest[0]][slowest[1]],
        )


def _crosses(link: Link | None) -> bool:
    return link is not None and link.label == ACROSS_SOCKETS


def _nearness(link: Link | None) -> int:
    return 0 if link is None else _NEARNESS.get(link.label, 0)


def weight(link: Link | None) -> float:
    """Bytes/s; where they are unknown, fewer than any link has: the number of NVLinks, or the label's nearness."""
    if link is None:
        return 0.0
    if link.bytes_per_s:
        return float(max(_LEAST_KNOWN, round(link.bytes_per_s)))
    bonds = link.label.removeprefix("NV")
    if bonds.isdecimal():
        return float(min(_LEAST_KNOWN - 1, max(_NEARNESS.values()) + 1 + int(bonds)))
    return float(_NEARNESS.get(link.label, 0))


_LEAST_KNOWN = 1000
"""The fewest bytes/s that a link counts with if its bandwidth is known."""


def _lowest(graph: _Graph, num_devices: int) -> tuple[int, ...]:
    """The best by 5 to 7 where nothing before them tells choices apart; in ascending order, which is the first ring.

    Fewest NUMA nodes are the fullest ones. In each way to take that many, the lowest ids do, but for the last of them
    where none is as near to a network card as another one in these NUMA nodes: the lowest such one takes its place.
    """
    by_numa: dict[int | None, list[int]] = {}
    for vertex, numa_node in enumerate(graph.numa_nodes):
        by_numa.setdefault(numa_node, []).append(vertex)
    fullest = sorted(map(len, by_numa.values()), reverse=True)
    num_numa_nodes = next(count for count in range(1, len(fullest) + 1) if sum(fullest[:count]) >= num_devices)
    candidates: list[tuple[int, ...]] = []
    for members in combinations(by_numa.values(), num_numa_nodes):
        vertices = sorted(vertex for member in members for vertex in member)
        if len(vertices) >= num_devices:
            nearest = max(vertices, key=lambda vertex: (graph.nic_nearness[vertex], -vertex))
            others = [vertex for vertex in vertices if vertex != nearest]
            candidates.append(tuple(sorted([nearest, *others[: num_devices - 1]])))
    return max(candidates, key=graph.place_rank)


def _rings(num_vertices: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Every ring over some of the vertices once, in the order of ids, from its lowest towards the smaller neighbour."""
    for first, *rest in combinations(range(num_vertices), num_devices):
        for order in permutations(rest):
            if len(order) < 2 or order[0] < order[-1]:
                yield (first, *order)


def _good_ring(graph: _Graph, num_devices: int) -> tuple[int, ...]:
    """A ring with a high rank. From each vertex a ring grows by the heaviest edge from its end; the best of these are
    improved as long as turning a part round (2-opt, Croes 1958) or exchanging one vertex for another ranks higher."""
    grown = sorted((_grow(graph, start, num_devices) for start in range(len(graph.devices))), key=graph.rank)
    best = max((_climb(graph, ring) for ring in grown[-_NUM_CLIMBS:]), key=graph.rank)
    lowest = best.index(min(best))
    forward = [*best[lowest:], *best[:lowest]]
    return tuple(min(forward, [forward[0], *reversed(forward[1:])]))


def _grow(graph: _Graph, start: int, num_devices: int) -> list[int]:
    ring = [start]
    while len(ring) < num_devices:
        left = [vertex for vertex in range(len(graph.devices)) if vertex not in ring]
        # Of equal ones the one that is best joined with all so far, so that groups fill up before the next is entered.
        to_ring = {vertex: [graph.weights[vertex][other] for other in ring] for vertex in left}
        ring.append(max(left, key=lambda vertex: (to_ring[vertex][-1], sum(to_ring[vertex]), -vertex)))
    return ring


def _climb(graph: _Graph, ring: list[int]) -> list[int]:
    """The ring after the first change that ranks higher, and so on until there is none."""
    height = graph.rank(ring)
    better = next((changed for changed in _changes(ring, len(graph.devices)) if graph.rank(changed) > height), None)
    return ring if better is None else _climb(graph, better)


def _changes(ring: list[int], num_vertices: int) -> Iterator[list[int]]:
    outside = [vertex for vertex in range(num_vertices) if vertex not in ring]
    for place in range(len(ring)):
        for vertex in outside:
            yield [*ring[:place], vertex, *ring[place + 1 :]]
    for first, last in combinations(range(len(ring)), 2):
        yield [*ring[:first], *reversed(ring[first : last + 1]), *ring[last + 1 :]]
