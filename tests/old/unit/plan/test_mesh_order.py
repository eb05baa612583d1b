"""The order of devices in a mesh, against trying every order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan import place
from paceline.plan.mesh_order import mesh_order
from paceline.plan.pick import pick, weight
from paceline.spec import Cluster, Device, Job, Link, Mesh, Node
from tests.data import topologies

LABELS = {"NV2": 50e9, "NV1": 25e9, "PIX": 12e9, "SYS": 6e9}


def node_of(labels: Sequence[str], num_devices: int) -> Node:
    """A node from the label of each pair, in the order of `combinations`."""
    devices = tuple(Device("cuda", index, "a GPU", 2**34) for index in range(num_devices))
    pairs = combinations(range(num_devices), 2)
    links = tuple(
        Link((f"GPU{i}", f"GPU{j}"), label, LABELS[label]) for (i, j), label in zip(pairs, labels, strict=True)
    )
    return Node("a-node", 8, 2**36, "", devices, links=links)


def slowest(node: Node, order: Sequence[int], size: int) -> float:
    """Bytes/s of the slowest ring over a group of `size` neighbours."""
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return min(weight(pick(node, size, group).ring.bottleneck) for group in groups)


def partings(devices: frozenset[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to part the devices into groups of `size`."""
    if not devices:
        yield []
        return
    for group in combinations(sorted(devices), size):
        if group[0] == min(devices):
            for others in partings(devices - set(group), size):
                yield [group, *others]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(LABELS)), min_size=15, max_size=15), st.sampled_from([2, 3]))
def test_no_order_has_a_faster_slowest_tensor_group(labels: list[str], degree: int) -> None:
    node = node_of(labels, 6)
    order = mesh_order(node, range(6), Mesh(tp=degree, dp=6 // degree))
    assert sorted(order) == list(range(6))
    best = max(slowest(node, sum(parting, ()), degree) for parting in partings(frozenset(range(6)), degree))
    assert slowest(node, order, degree) == best


def test_pairs_that_nvlink_joins_are_tensor_groups() -> None:
    joined = {(0, 3): "NV2", (1, 2): "NV2"}
    node = node_of([joined.get(pair, "PIX") for pair in combinations(range(4), 2)], 4)
    assert mesh_order(node, (0, 1, 2, 3), Mesh(tp=2, dp=2)) == (0, 3, 1, 2)
    # The ring of all four does as it is where the mesh has one axis.
    assert mesh_order(node, (0, 1, 2, 3), Mesh(fsdp=4)) == (0, 1, 2, 3)


def test_replicas_of_a_tensor_group_face_each_other() -> None:
    """The hybrid cube of DGX-1: two quads, each device joined with one of the other quad."""
    node = topologies.load("dgx1").nodes[0]
    order = mesh_order(node, range(8), Mesh(tp=4, dp=2))
    assert set(order[:4]) in ({0, 1, 2, 3}, {4, 5, 6, 7})
    for one, other in zip(order[:4], order[4:], strict=True):
        link = node.link(f"GPU{min(one, other)}", f"GPU{max(one, other)}")
        assert link is not None and link.label.startswith("NV")


@pytest.mark.parametrize("mesh", [Mesh(tp=2, fsdp=4), Mesh(tp=2, fsdp=2, dp=2), Mesh(tp=4, pp=2), Mesh(tp=8)])
def test_every_axis_of_every_recorded_node(mesh: Mesh) -> None:
    for name in topologies.names():
        node = topologies.load(name).nodes[0]
        if len(node.devices) >= 8:
            devices = [device.index for device in node.devices][:8]
            order = mesh_order(node, devices, mesh)
            assert sorted(order) == devices
            assert slowest(node, order, mesh.tp) >= slowest(node, devices, mesh.tp)


def test_a_plan_has_the_order() -> None:
    joined = {(0, 3): "NV2", (1, 2): "NV2"}
    node = node_of([joined.get(pair, "PIX") for pair in combinations(range(4), 2)], 4)
    plan = place(Job(), Cluster((node,)), 4, mesh=Mesh(tp=2, dp=2))
    assert plan.nodes[0].devices == (0, 3, 1, 2)
