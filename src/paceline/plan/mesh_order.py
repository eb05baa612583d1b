"""The order of a node's devices in a mesh: the axis that sends most gets the fastest links.

Ranks are laid out with the tensor axis innermost, then fsdp, dp and pp (`spec.mesh.AXES`), so a tensor group has
neighbouring ranks, and with them neighbouring places in this order. Groups are formed from the inside out: of all
partitions of the devices into groups, the one whose slowest ring is fastest, then the one with the largest sum over
groups; groups of the next axis are formed of whole groups of the one before, by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations

from paceline.plan.pick import pick, weight
from paceline.spec import Mesh, Node
from paceline.spec.mesh import AXES

_MOST_EXACT = 8
"""Up to this many groups or devices all partitions are tried; beyond, a greedy search takes the fastest group first."""

Group = tuple[int, ...]
"""Devices in the order of their ranks."""


def mesh_order(node: Node, ring: Sequence[int], mesh: Mesh) -> Group:
    """The devices of `ring`, which work on this node, in the order of their ranks.

    If no axis divides them into groups, that is `ring` itself.
    """
    arranger, step = _Arranger(node), 1
    groups: list[Group] = [(device,) for device in ring]
    sizes = _group_sizes(len(ring), mesh)
    for size in sizes:
        num_each = size // len(groups[0])
        partings = ([arranger.joined(part, step) for part in one] for one in arranger.partings(groups, num_each))
        groups, step = max(partings, key=arranger.worth), len(groups[0])
    return arranger.joined(groups, step) if sizes else tuple(ring)


def _group_sizes(num_devices: int, mesh: Mesh) -> list[int]:
    """The number of devices in a group of each axis that divides the node's devices, innermost first."""
    sizes, size = [], 1
    for axis in reversed(AXES):
        degree = mesh.degree(axis)
        size *= degree
        if degree > 1 and size < num_devices and num_devices % size == 0:
            sizes.append(size)
    return sizes


class _Arranger:
    """One node, and the best rings over some of its devices as far as they were asked for."""

    def __init__(self, node: Node) -> None:
        self._ring = lru_cache(maxsize=None)(lambda members: pick(node, len(members), tuple(members)).ring)

    def worth(self, groups: Sequence[Group]) -> tuple[float, float]:
        """The slowest of the groups' rings, and the sum over them."""
        speeds = [weight(self._ring(frozenset(group)).bottleneck) for group in groups]
        return min(speeds), sum(speeds)

    def partings(self, groups: Sequence[Group], num_each: int) -> Iterator[list[tuple[Group, ...]]]:
        """Partitions of the groups into sets of `num_each`."""
        if len(groups) > _MOST_EXACT:
            yield self._greedy(groups, num_each)
        elif not groups:
            yield []
        else:
            first, *others = groups
            for rest in combinations(others, num_each - 1):
                left = [group for group in others if group not in rest]
                for parting in self.partings(left, num_each):
                    yield [(first, *rest), *parting]

    def _greedy(self, groups: Sequence[Group], num_each: int) -> list[tuple[Group, ...]]:
        """The first group that is left with those that are fastest with it, one after the other."""
        left, found = list(groups), []
        while left:
            part = [left.pop(0)]
            while len(part) < num_each:
                near = max(left, key=lambda group: self._slowest_link(part[0], group))
                left.remove(near)
                part.append(near)
            found.append(tuple(part))
        return found

    def joined(self, groups: Sequence[Group], step: int) -> Group:
        """The groups one after the other; single devices as their ring goes, groups each turned towards the first."""
        first, *others = groups
        if others and len(first) == 1:
            return self._ring(frozenset(device for group in groups for device in group)).devices
        return first + tuple(device for group in others for device in self._turned(group, first, step))

    def _turned(self, group: Group, first: Group, step: int) -> Group:
        """The same group from another one of its parts, or a ring the other way round.

        Members at the same position of both groups also communicate.
        """
        ways = (group, group[::-1]) if step == 1 else (group,)
        turns = [way[place:] + way[:place] for way in ways for place in range(0, len(group), step)]
        return max(turns, key=lambda turn: min(map(self._rate, turn, first)))

    def _slowest_link(self, one: Group, other: Group) -> float:
        return min(self._rate(a, b) for a in one for b in other)

    def _rate(self, one: int, other: int) -> float:
        return weight(self._ring(frozenset((one, other))).bottleneck)
