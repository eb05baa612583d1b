"""Choosing devices, against trying every ring over every set of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ClusterError
from paceline.plan.pick import MOST_EXACT, pick
from paceline.spec import Device, Link, Node, Peripheral
from paceline.spec.device_choice import DeviceChoice
from tests.data import topologies

NEAREST_FIRST = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS", "")
RATES = {"NV2": 50e9, "NV1": 25e9, "PIX": 12e9, "PXB": 12e9, "PHB": 10e9, "NODE": 10e9, "SYS": 6e9}


def node_of(
    matrix: dict[tuple[int, int], str],
    num_devices: int,
    *,
    rates: dict[str, float] = RATES,
    numa_nodes: Sequence[int | None] = (),
    nics: Sequence[Sequence[str]] = (),
) -> Node:
    """A node from the label of each pair (i < j) and, for each device, the labels of its ways to the NICs."""
    devices = tuple(
        Device("cuda", i, "a GPU", 2**34, numa_node=numa_nodes[i] if numa_nodes else None) for i in range(num_devices)
    )
    links = [Link((f"GPU{i}", f"GPU{j}"), label, rates.get(label)) for (i, j), label in matrix.items()]
    for i, labels in enumerate(nics):
        links += [Link((f"GPU{i}", f"NIC{place}"), label, rates.get(label)) for place, label in enumerate(labels)]
    cards = tuple(Peripheral("nic", f"NIC{place}", f"mlx5_{place}") for place in range(len(nics[0]) if nics else 0))
    return Node("a-node", 8, 2**36, "", devices, cards, tuple(links))


def hops(ring: Sequence[int]) -> list[tuple[int, int]]:
    return [(ring[place - 1], ring[place]) for place in range(len(ring))] if len(ring) > 1 else []


class Trial:
    """Every ring of a node by the criteria in the issue's words, written once more and without any cleverness."""

    def __init__(self, node: Node) -> None:
        self.devices = sorted(device.index for device in node.devices)
        self.numa_of = {device.index: device.numa_node for device in node.devices}
        nics = [peripheral.label for peripheral in node.peripherals if peripheral.kind == "nic"]
        self.ways = {i: [way for nic in nics if (way := node.link(f"GPU{i}", nic))] for i in self.devices}
        pairs = {(i, j): node.link(f"GPU{i}", f"GPU{j}") for i, j in permutations(self.devices, 2)}
        self.rate = {pair: link.bytes_per_s or 0.0 if link else 0.0 for pair, link in pairs.items()}
        self.crosses = {pair: link is not None and link.label == "SYS" for pair, link in pairs.items()}

    def any_crosses(self, devices: Sequence[int]) -> bool:
        return any(self.crosses[pair] for pair in combinations(devices, 2))

    def merit(self, ring: Sequence[int]) -> tuple[Any, ...]:
        """The smaller the better."""
        rates = [self.rate[hop] for hop in hops(ring)]
        ways = [way for device in ring for way in self.ways[device]]
        return (
            self.any_crosses(ring),
            any(self.crosses[hop] for hop in hops(ring)),
            -min(rates, default=0.0),
            -sum(rates),
            len({self.numa_of[device] for device in ring}),
            min(((NEAREST_FIRST.index(way.label), -(way.bytes_per_s or 0.0)) for way in ways), default=(99, 0.0)),
            sorted(ring),
            list(ring),
        )

    def rings(self, devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Every ring over the devices once, from the lowest towards the smaller neighbour."""
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


def gpu_node(name: str) -> Node:
    return topologies.load(name).nodes[0]


@pytest.fixture(scope="module")
def dgx1() -> Node:
    return gpu_node("dgx1")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if len(gpu_node(name).devices) > 8 else [])
        for name in topologies.names()
    ],
)
def test_every_fixture_agrees_with_trying_all_rings(name: str) -> None:
    node = gpu_node(name)
    trial = Trial(node)
    for num_devices in range(1, min(8, len(node.devices)) + 1):
        assert pick(node, num_devices).ring.devices == trial.best_ring(num_devices), num_devices


@pytest.mark.parametrize("name", topologies.names())
def test_no_pick_has_a_pair_across_sockets_where_one_without_exists(name: str) -> None:
    node = gpu_node(name)
    trial = Trial(node)
    for num_devices in range(1, min(8, len(node.devices)) + 1):
        must_cross = all(map(trial.any_crosses, combinations(trial.devices, num_devices)))
        assert trial.any_crosses(pick(node, num_devices).devices) == must_cross, num_devices


def test_the_hybrid_mesh_gives_a_double_link_to_two_and_its_ring_to_all(dgx1: Node) -> None:
    two, four, eight = (pick(dgx1, k) for k in (2, 4, 8))
    assert two.ring.bottleneck is not None and two.ring.bottleneck.label == "NV2"
    assert two.devices == (0, 3)
    assert (four.ring.devices, four.ring.bottleneck and four.ring.bottleneck.label) == ((0, 1, 2, 3), "NV1")
    assert eight.ring.devices == (0, 3, 2, 1, 5, 6, 7, 4)
    assert eight.ring.bottleneck is not None and eight.ring.bottleneck.label == "NV2"
    assert eight.naive.bottleneck is not None and eight.naive.bottleneck.label == "SYS"
    assert all(choice.is_exact for choice in (two, four, eight))


def test_the_naive_choice_is_priced_by_the_law_of_the_ring(dgx1: Node) -> None:
    choice = pick(dgx1, 2)
    assert choice.naive.devices == (0, 1)
    assert choice.naive.all_reduce_s(1e9) == pytest.approx(1e9 / 25e9)
    assert choice.ring.all_reduce_s(1e9) == pytest.approx(1e9 / 50e9)
    assert pick(dgx1, 4).ring.all_reduce_s(1e9) == pytest.approx(1.5 * 1e9 / 25e9)
    assert pick(dgx1, 1).ring.all_reduce_s(1e9) == 0


def test_only_what_is_allowed_is_chosen(dgx1: Node) -> None:
    allowed = (7, 6, 1, 5)
    assert pick(dgx1, 2, allowed).devices == (1, 5)
    choice = pick(dgx1, 4, allowed)
    assert (choice.devices, choice.naive.devices) == ((1, 5, 6, 7), (1, 5, 6, 7))


@pytest.mark.parametrize("num_devices", [0, -1, 5])
def test_too_many_and_too_few_are_one_sentence(dgx1: Node, num_devices: int) -> None:
    with pytest.raises(
        ClusterError, match=rf"^{num_devices} devices cannot be chosen: .* has 4 devices to choose from\.$"
    ):
        pick(dgx1, num_devices, [0, 1, 2, 3])


def test_a_link_between_sockets_loses_even_where_it_is_the_fastest() -> None:
    matrix = {(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"}
    assert pick(node_of(matrix, 3, rates={"PHB": 1e9, "SYS": 9e9}), 2).devices == (0, 1)


def test_no_pair_across_sockets_goes_before_the_ring() -> None:
    """0-1-2-3 is a ring of fast links with slow SYS diagonals; 4 … 7 are joined by slower links, all of them."""
    fast = {(0, 1), (1, 2), (2, 3), (0, 3)}
    slow = set(combinations(range(4, 8), 2))
    matrix = {pair: "NV2" if pair in fast else "PIX" if pair in slow else "SYS" for pair in combinations(range(8), 2)}
    assert pick(node_of(matrix, 8), 4).devices == (4, 5, 6, 7)
    assert pick(node_of(matrix, 8), 4, range(5)).ring.devices == (0, 1, 2, 3)


def test_ties_go_to_one_numa_node_then_to_the_network_card_then_to_low_ids() -> None:
    alike = dict.fromkeys(combinations(range(4), 2), "NV2")
    assert pick(node_of(alike, 4), 2).devices == (0, 1)
    assert pick(node_of(alike, 4, numa_nodes=(0, 1, 1, 0)), 2).devices == (0, 3)
    nics = (["SYS"], ["PXB"], ["PIX"], ["SYS"])
    assert pick(node_of(alike, 4, nics=nics), 2).devices == (0, 2)
    assert pick(node_of(alike, 4, numa_nodes=(0, 1, 1, 0), nics=nics), 2).devices == (1, 2)


def test_labels_decide_where_no_bandwidth_is_known() -> None:
    matrix = {(0, 1): "SYS", (0, 2): "PHB", (1, 2): "NV1"}
    choice = pick(node_of(matrix, 3, rates={}), 2)
    assert choice.devices == (1, 2)
    assert choice.ring.all_reduce_s(1e9) is None


def test_devices_of_which_nothing_is_known_are_no_error() -> None:
    choice = pick(node_of({}, 3), 3)
    assert (choice.ring.devices, choice.ring.bottleneck, choice.ring.all_reduce_s(1e9)) == ((0, 1, 2), None, None)


@st.composite
def nodes(draw: st.DrawFn, most: int = 7) -> Node:
    """Any labels on any pairs, pairs left out too, at bandwidths of the labels or each pair's own."""
    num_devices = draw(st.integers(2, most))
    labels = st.sampled_from(draw(st.sampled_from([["NV1", "NV2", "SYS"], ["NV2", "NV1"], [*RATES], ["PIX", ""]])))
    matrix = {pair: draw(labels) for pair in combinations(range(num_devices), 2)}
    nics = draw(st.integers(0, 2))
    node = node_of(
        {pair: label for pair, label in matrix.items() if label},
        num_devices,
        numa_nodes=[draw(st.sampled_from([0, 1])) for _ in range(num_devices)],
        nics=[[draw(st.sampled_from(["PIX", "PXB", "NODE", "SYS"])) for _ in range(nics)] for _ in range(num_devices)],
    )
    if draw(st.booleans()):
        measured = st.integers(10**9, 10**9 + 3).map(float)
        links = [Link(link.ends, link.label, draw(measured), source="measured") for link in node.links]
        node = Node("measured", 8, 2**36, "", node.devices, node.peripherals, tuple(links))
    return node


@given(nodes(), st.data())
@settings(max_examples=100)
def test_any_graph_agrees_with_trying_all_rings(node: Node, data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(1, len(node.devices)))
    assert pick(node, num_devices).ring.devices == Trial(node).best_ring(num_devices)


def random_node(num_devices: int, labels: Sequence[str], seed: int) -> Node:
    """Labels spread by a linear congruential sequence; no generator of the library's is needed for that."""
    state, matrix = seed, {}
    for pair in combinations(range(num_devices), 2):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        matrix[pair] = labels[(state >> 33) % len(labels)]
    return node_of(matrix, num_devices)


@pytest.mark.parametrize("labels", [["NV1", "NV2"], ["NV1", "NV2", "SYS"], [*RATES]])
def test_every_choice_among_sixteen_is_searched(labels: list[str]) -> None:
    """Trying all rings would take hours; that this ends is what is tested."""
    node = random_node(16, labels, seed=1)
    trial = Trial(node)
    for num_devices in (3, 8, 12, 15, 16):
        choice = pick(node, num_devices)
        assert choice.is_exact
        assert len(choice.devices) == num_devices
        assert trial.merit(choice.ring.devices) <= trial.merit(choice.naive.devices)


@pytest.mark.parametrize("weakest", ["NV2", "NV1"])
@pytest.mark.parametrize("num_devices", [3, 8, 13, 16])
@given(order=st.permutations(range(16)))
@settings(max_examples=3, deadline=None)
def test_the_one_best_ring_among_sixteen_is_found(num_devices: int, weakest: str, order: list[int]) -> None:
    """Its links are double, but for one of them where the sum and not the bottleneck makes it the best."""
    lowest = order.index(min(order[:num_devices]))
    ring = [*order[lowest:num_devices], *order[:lowest]]
    matrix = dict.fromkeys(combinations(range(16), 2), "NV1")
    matrix |= dict.fromkeys(((min(hop), max(hop)) for hop in hops(ring)), "NV2")
    matrix[min(order[:2]), max(order[:2])] = weakest
    found = pick(node_of(matrix, 16), num_devices).ring.devices
    assert found == min(tuple(ring), (ring[0], *reversed(ring[1:])))


def test_a_switch_joining_many_is_exact_beyond_sixteen() -> None:
    node = node_of(
        dict.fromkeys(combinations(range(72), 2), "NV18"),
        72,
        rates={"NV18": 450e9},
        numa_nodes=[i % 2 for i in range(72)],
    )
    choice = pick(node, 36)
    assert (choice.is_exact, choice.ring.devices) == (True, tuple(range(0, 72, 2)))


def groups_of_eight(num_groups: int) -> Node:
    """PIX inside of each group, SYS between them."""
    pairs = combinations(range(8 * num_groups), 2)
    return node_of({(i, j): "PIX" if i // 8 == j // 8 else "SYS" for i, j in pairs}, 8 * num_groups)


@pytest.mark.parametrize(("num_devices", "devices"), [(2, (0, 1)), (5, tuple(range(5))), (8, tuple(range(8)))])
def test_beyond_sixteen_the_choice_is_good_and_says_that_it_may_not_be_the_best(
    num_devices: int, devices: tuple[int, ...]
) -> None:
    choice = pick(groups_of_eight(3), num_devices)
    assert len(groups_of_eight(3).devices) > MOST_EXACT
    assert choice.devices == devices
    assert choice.is_exact == (num_devices == 2)


def test_beyond_sixteen_a_ring_crosses_as_seldom_as_it_can() -> None:
    choice: DeviceChoice = pick(groups_of_eight(3), 16)
    ring = choice.ring.devices
    assert sum(one // 8 != other // 8 for one, other in hops(ring)) == 2
    assert ring[0] == min(ring) and ring[1] < ring[-1]
