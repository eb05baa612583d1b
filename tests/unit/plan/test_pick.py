"""Which devices of a node work together, and in which order around the ring: against trying every ring over every set.

The first that tells two choices apart decides: no pair across sockets, no hop across sockets, the fastest slowest hop,
the highest sum of bandwidth, the fewest NUMA nodes, the nearest network card, the lowest ids.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

import pytest

import paceline
from paceline.errors import ClusterError
from paceline.report.topology import all_reduce_1_gb_s
from paceline.spec import Cluster, Device, Link, Node
from paceline.spec.cluster import DeviceChoice
from tests.data import topologies

NEAREST_FIRST = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS", "")
RATES = {"NV2": 50e9, "NV1": 25e9, "PIX": 12e9, "PXB": 12e9, "PHB": 10e9, "NODE": 10e9, "SYS": 6e9}
RECORDED = topologies.names()


def node_of(
    matrix: dict[tuple[int, int], str],
    num_devices: int,
    *,
    rates: dict[str, float] = RATES,
    numa_nodes: Sequence[int | None] = (),
    nics: Sequence[Sequence[str]] = (),
    busy: Sequence[int] = (),
) -> Node:
    """A node from the label of each pair (i < j) and, for each device, the labels of its ways to the network cards."""
    devices = tuple(
        Device("cuda", i, "a GPU", 2**34, numa_node=numa_nodes[i] if numa_nodes else None, busy="in use" * (i in busy))
        for i in range(num_devices)
    )
    links = [Link((f"GPU{i}", f"GPU{j}"), label, rates.get(label)) for (i, j), label in matrix.items()]
    for i, labels in enumerate(nics):
        links += [Link((f"GPU{i}", f"NIC{place}"), label, rates.get(label)) for place, label in enumerate(labels)]
    cards = {f"NIC{place}": f"mlx5_{place}" for place in range(len(nics[0]) if nics else 0)}
    return Node("a-node", 8, 2**36, "", devices, cards, tuple(links))


def pick(node: Node, num_devices: int) -> DeviceChoice:
    choice = paceline.topo(Cluster((node,)), pick=num_devices).choice
    assert choice is not None
    return choice


class Trial:
    """Every ring of a node by the criteria in plain words, one after the other."""

    def __init__(self, node: Node) -> None:
        self.devices = sorted(device.index for device in node.devices)
        self.numa_of = {device.index: device.numa_node for device in node.devices}
        nics = list(node.nics)
        self.ways = {i: [way for nic in nics if (way := node.link(f"GPU{i}", nic))] for i in self.devices}
        pairs = {(i, j): node.link(f"GPU{i}", f"GPU{j}") for i, j in permutations(self.devices, 2)}
        self.rate = {pair: link.bytes_per_s or 0.0 if link else 0.0 for pair, link in pairs.items()}
        self.crosses = {pair: link is not None and link.label == "SYS" for pair, link in pairs.items()}

    def merit(self, ring: Sequence[int]) -> tuple[Any, ...]:
        """The smaller the better."""
        hops = [(ring[place - 1], ring[place]) for place in range(len(ring))] if len(ring) > 1 else []
        rates = [self.rate[hop] for hop in hops]
        ways = [way for device in ring for way in self.ways[device]]
        return (
            any(self.crosses[pair] for pair in combinations(ring, 2)),
            any(self.crosses[hop] for hop in hops),
            -min(rates, default=0.0),
            -sum(rates),
            len({self.numa_of[device] for device in ring}),
            min(((NEAREST_FIRST.index(way.label), -(way.bytes_per_s or 0.0)) for way in ways), default=(99, 0.0)),
            sorted(ring),
            list(ring),
        )

    def rings(self, devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Every ring over the devices once, from the lowest towards its smaller neighbour."""
        first, *rest = sorted(devices)
        if len({(self.rate[pair], self.crosses[pair]) for pair in combinations(devices, 2)}) < 2:
            yield (first, *rest)  # all rings are alike, and this is the first of them
            return
        for order in permutations(rest):
            if len(order) < 2 or order[0] < order[-1]:
                yield (first, *order)

    def best_ring(self, num_devices: int) -> tuple[int, ...]:
        sets = combinations(self.devices, num_devices)
        return min((ring for chosen in sets for ring in self.rings(chosen)), key=self.merit)


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_machine_agrees_with_trying_all_rings(name: str) -> None:
    node = topologies.load(name).nodes[0]
    trial = Trial(node)
    most = 8 if len(node.devices) <= 8 else 4
    for num_devices in range(1, min(most, len(node.devices)) + 1):
        choice = pick(node, num_devices)
        assert choice.ring.devices == trial.best_ring(num_devices), num_devices
        assert choice.is_exact


def machine_of(draw: random.Random) -> Node:
    """Any labels on any pairs, pairs left out too, at bandwidths of the labels or each pair's own."""
    num_devices = draw.randint(2, 6)
    labels = draw.choice([["NV1", "NV2", "SYS"], ["NV2", "NV1"], [*RATES], ["PIX", ""]])
    matrix = {pair: draw.choice(labels) for pair in combinations(range(num_devices), 2)}
    nics = draw.randint(0, 2)
    node = node_of(
        {pair: label for pair, label in matrix.items() if label},
        num_devices,
        numa_nodes=[draw.randint(0, 1) for _ in range(num_devices)],
        nics=[[draw.choice(["PIX", "PXB", "NODE", "SYS"]) for _ in range(nics)] for _ in range(num_devices)],
    )
    if draw.random() < 0.5:
        links = [Link(link.ends, link.label, 1e9 + draw.randint(0, 3)) for link in node.links]
        node = Node("measured", 8, 2**36, "", node.devices, node.nics, tuple(links))
    return node


@pytest.mark.parametrize("seed", range(4))
def test_any_machine_agrees_with_trying_all_rings(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        node = machine_of(draw)
        num_devices = draw.randint(1, len(node.devices))
        assert pick(node, num_devices).ring.devices == Trial(node).best_ring(num_devices), node


def test_a_dgx1_gives_two_gpus_a_double_link_and_eight_a_ring_of_them() -> None:
    dgx1 = topologies.load("dgx1").nodes[0]
    two, four, eight = (pick(dgx1, count).ring for count in (2, 4, 8))
    assert (two.devices, two.bottleneck and two.bottleneck.label) == ((0, 3), "NV2")
    assert (four.devices, four.bottleneck and four.bottleneck.label) == ((0, 1, 2, 3), "NV1")
    assert (eight.devices, eight.bottleneck and eight.bottleneck.label) == ((0, 3, 2, 1, 5, 6, 7, 4), "NV2")
    naive = pick(dgx1, 8).naive.bottleneck
    assert naive is not None and naive.label == "SYS"


@pytest.mark.parametrize(("count", "bytes_per_s"), [(2, 50e9), (4, 25e9), (8, 50e9)])
def test_a_ring_is_priced_by_its_slowest_hop(count: int, bytes_per_s: float) -> None:
    """2 (n - 1) / n of the gradients over it (Patarasuk and Yuan 2009)."""
    ring = pick(topologies.load("dgx1").nodes[0], count).ring
    assert all_reduce_1_gb_s(ring) == pytest.approx(2 * (count - 1) / count * 1e9 / bytes_per_s)


ALIKE = dict.fromkeys(combinations(range(4), 2), "NV2")
NICS = (["SYS"], ["PXB"], ["PIX"], ["SYS"])


@pytest.mark.parametrize(
    ("node", "devices"),
    [
        # A link between sockets loses even where it is the fastest.
        (node_of({(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"}, 3, rates={"PHB": 1e9, "SYS": 9e9}), (0, 1)),
        # Labels decide where no bandwidth is known.
        (node_of({(0, 1): "SYS", (0, 2): "PHB", (1, 2): "NV1"}, 3, rates={}), (1, 2)),
        (node_of(ALIKE, 4), (0, 1)),
        (node_of(ALIKE, 4, numa_nodes=(0, 1, 1, 0)), (0, 3)),
        (node_of(ALIKE, 4, nics=NICS), (0, 2)),
        (node_of(ALIKE, 4, numa_nodes=(0, 1, 1, 0), nics=NICS), (1, 2)),
        (node_of(ALIKE, 4, busy=(0, 2)), (1, 3)),
        (node_of({}, 3), (0, 1)),
    ],
)
def test_ties_are_broken_in_the_documented_order(node: Node, devices: tuple[int, ...]) -> None:
    assert tuple(sorted(pick(node, 2).ring.devices)) == devices


def test_no_pair_across_sockets_goes_before_the_bandwidth_of_the_ring() -> None:
    """0-1-2-3 is a ring of fast links with slow SYS diagonals; 4 … 7 are joined by slower links, all of them."""
    fast, slow = {(0, 1), (1, 2), (2, 3), (0, 3)}, set(combinations(range(4, 8), 2))
    matrix = {pair: "NV2" if pair in fast else "PIX" if pair in slow else "SYS" for pair in combinations(range(8), 2)}
    assert sorted(pick(node_of(matrix, 8), 4).ring.devices) == [4, 5, 6, 7]


@pytest.mark.parametrize("count", [6, 8])
def test_of_many_devices_those_of_one_group_are_chosen_without_trying_all_rings(count: int) -> None:
    """Two groups of eight; inside of one every second hop of the best ring is faster."""
    pairs = list(combinations(range(16), 2))
    matrix = {(i, j): ("NV2" if i // 2 == j // 2 else "NV1") if i // 8 == j // 8 else "SYS" for i, j in pairs}
    choice = pick(node_of(matrix, 16), count)
    assert sorted(choice.ring.devices) == list(range(count)) and not choice.is_exact
    assert (
        sum(
            matrix[min(hop), max(hop)] == "NV2"
            for hop in zip(choice.ring.devices[::2], choice.ring.devices[1::2], strict=True)
        )
        == count // 2
    )


def test_busy_gpus_are_left_out() -> None:
    node = node_of(ALIKE, 4, busy=(1,))
    assert sorted(pick(node, 3).ring.devices) == [0, 2, 3]
    assert any("GPU1" in note or "GPU 1" in note for note in paceline.topo(Cluster((node,))).node.notes)


@pytest.mark.parametrize("num_devices", [0, -1, 4, 100])
def test_too_many_and_too_few_are_refused_with_what_there_is(num_devices: int) -> None:
    with pytest.raises(ClusterError) as caught:
        pick(node_of(ALIKE, 4, busy=(1,)), num_devices)
    assert str(num_devices) in str(caught.value) and "3" in str(caught.value)
