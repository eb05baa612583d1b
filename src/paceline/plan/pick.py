"""Which devices of a node should work together, and in which order: around the ring, or on a mesh.

A ring all_reduce is as fast as its slowest link, so the K devices are those whose best ring has the highest bottleneck
bandwidth. In full, the first that tells two choices apart decides:

1. No two of the chosen are joined by SYS, the link between sockets, if K devices without such a pair exist. This comes
   before bandwidth: other collectives (all_to_all, trees) use more pairs than those of the ring.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from paceline.errors import ClusterError
from paceline.spec import Mesh, Node
from paceline.spec.cluster import DeviceChoice, DeviceRing, Link
from paceline.spec.plan import AXES
from paceline.words import number_of

_MOST_RINGS = 20_000
"""So many rings are all tried, as over any of 8 devices or 4 of 16; of more only devices with
neighbouring ids are, in this order."""
_MOST_ORDERED = 8
"""Up to this many devices of a node all orders on a mesh are tried; more keep the order of their ring."""
ACROSS_SOCKETS = "SYS"
_NEARNESS = {ACROSS_SOCKETS: 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5}
"""The nearness of the ends of a PCIe label; NVLink and the like are nearer, and an unknown label is 0."""
_LEAST_KNOWN = 1000
"""The fewest bytes/s that a link counts with if its bandwidth is known."""


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
    sets: Iterable[tuple[int, ...]] = combinations(range(present), num_devices)
    rings_of_a_set = 1 if graph.is_uniform else max(1, math.factorial(num_devices - 1) // 2)
    is_exact = math.comb(present, num_devices) * rings_of_a_set <= _MOST_RINGS
    if not is_exact:
        sets = (tuple(range(first, first + num_devices)) for first in range(present - num_devices + 1))
    rings = sets if graph.is_uniform or not is_exact else _rings(sets)
    ring = max(rings, key=graph.rank)  # of equal ones the first
    return DeviceChoice(graph.ring(ring), graph.ring(range(num_devices)), is_exact)


@dataclass(frozen=True)
class _Graph:
    """The devices to choose among, as vertices 0 … n - 1 in the order of their ids."""

    devices: tuple[int, ...]
    links: tuple[tuple[Link | None, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    """[vertex][vertex]: bytes/s of the link in whole numbers, which add up exactly; the larger the better."""
    numa_nodes: tuple[int | None, ...]
    nic_nearness: tuple[tuple[int, float], ...]
    """[vertex]: nearness of the label and weight of the shortest path to a network card."""

    @classmethod
    def of(cls, node: Node, allowed: Sequence[int] | None) -> _Graph:
        chosen = {device.index: device for device in node.devices if allowed is None or device.index in allowed}
        devices = [chosen[index] for index in sorted(chosen)]
        nics = list(node.nics)
        by_ends = {frozenset(link.ends): link for link in node.links}
        links = [[by_ends.get(frozenset((one.label, other.label))) for other in devices] for one in devices]
        ways = [[by_ends.get(frozenset((device.label, nic))) for nic in nics] for device in devices]
        return cls(
            devices=tuple(device.index for device in devices),
            links=tuple(map(tuple, links)),
            weights=tuple(tuple(map(weight, row)) for row in links),
            numa_nodes=tuple(device.numa_node for device in devices),
            nic_nearness=tuple(max(((_nearness(way), weight(way)) for way in row), default=(0, 0.0)) for row in ways),
        )

    @property
    def is_uniform(self) -> bool:
        """Whether no pair of devices is better than another."""
        pairs = list(combinations(range(len(self.devices)), 2))
        return len({(self.weights[one][other], self.crosses(one, other)) for one, other in pairs}) < 2

    def crosses(self, one: int, other: int) -> bool:
        link = self.links[one][other]
        return link is not None and link.label == ACROSS_SOCKETS

    def rank(self, ring: Sequence[int]) -> tuple[object, ...]:
        """What 1 to 7 compare, for one ring or pair, the larger the better."""
        hops = _hops(ring)
        weights = [self.weights[one][other] for one, other in hops]
        return (
            not any(self.crosses(one, other) for one, other in combinations(ring, 2)),
            not any(self.crosses(one, other) for one, other in hops),
            min(weights),
            sum(weights),
            -len({self.numa_nodes[vertex] for vertex in ring}),
            max(self.nic_nearness[vertex] for vertex in ring),
            [-vertex for vertex in sorted(ring)],
        )

    def ring(self, vertices: Sequence[int]) -> DeviceRing:
        one, other = min(_hops(vertices), key=lambda hop: (self.weights[hop[0]][hop[1]], not self.crosses(*hop)))
        return DeviceRing(tuple(self.devices[vertex] for vertex in vertices), self.links[one][other])


def _hops(ring: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ring, [*ring[1:], *ring[:1]], strict=True))


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
    return float(_nearness(link))


def _rings(sets: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Every ring over each of the sets once, in the order of ids, from its lowest towards the smaller neighbour."""
    for first, *rest in sets:
        for order in permutations(rest):
            if len(order) < 2 or order[0] < order[-1]:
                yield (first, *order)


def mesh_order(node: Node, ring: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The devices of `ring`, which work on this node, in the order of their ranks on a mesh.

    The axis that sends most gets the fastest links: ranks are laid out with the tensor axis innermost, then fsdp, dp
    and pp. Of all orders of up to 8 devices it is the one whose slowest hop along the innermost axis is fastest, then
    the one with the largest sum of these hops, then by the same of the next axis, and so on. Groups that do not lie
    evenly in the node have no say.
    """
    num_devices, stride = len(ring), 1
    hops_by_axis = []
    for axis in reversed(AXES):
        degree = mesh.degree(axis)
        if degree > 1 and num_devices % (stride * degree) == 0:
            ends = [place // stride % degree == degree - 1 for place in range(num_devices)]
            steps = [stride * (1 - degree if is_end else 1) for is_end in ends]
            hops_by_axis.append([(place, place + step) for place, step in enumerate(steps)])
        stride *= degree
    if num_devices > _MOST_ORDERED or not hops_by_axis:
        return tuple(ring)
    label_of = {device.index: device.label for device in node.devices}
    rate = {pair: weight(node.link(*map(label_of.__getitem__, pair))) for pair in permutations(ring, 2)}

    def worth(order: tuple[int, ...]) -> list[tuple[float, float]]:
        rates = [[rate[order[one], order[other]] for one, other in hops] for hops in hops_by_axis]
        return [(min(of_axis), sum(of_axis)) for of_axis in rates]

    # Along each axis groups are rings, so that any device may be the first one.
    return max(((ring[0], *rest) for rest in permutations(ring[1:])), key=worth)
