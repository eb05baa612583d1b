"""Which links are timed, what a timing says about others, and what is said of those that cannot be timed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure import link_probe
from paceline.measure.link_probe import LinkTimes, measure_links
from paceline.measure.values import LinkProbe
from paceline.measure.which_links import links_to_time, merged_reasons, node_pairs, with_measured
from paceline.spec import Device, Link, Node


def node(hostname: str, *labels: str, num_gpus: int = 4) -> Node:
    """GPUs in a row, the first pair linked by the first label and so on, and a network card at the first one."""
    devices = tuple(Device("cuda", i, "H100", 2**36) for i in range(num_gpus))
    links = tuple(Link((f"GPU{i}", f"GPU{i + 1}"), label, 1e9) for i, label in enumerate(labels))
    return Node(hostname, 8, 2**36, "cpu", devices, links=(*links, Link(("GPU0", "NIC0"), "PIX", 1e9)))


def test_every_label_is_measured_once_and_only_between_devices() -> None:
    chosen = links_to_time(node("a", "NV4", "SYS", "NV4"))
    assert [(link.label, link.ends) for link in chosen] == [("NV4", ("GPU0", "GPU1")), ("SYS", ("GPU1", "GPU2"))]


def test_a_label_that_was_measured_speaks_for_all_of_its_kind() -> None:
    measured = [
        Link(("GPU0", "GPU1"), "NV4", 2e11, 1e-5, "measured"),
        Link(("GPU0", "GPU1"), "PIX", 3e10, 1e-5, "measured"),
    ]
    links = with_measured(node("a", "NV4", "SYS", "NV4"), measured).links
    assert [(link.ends, link.label, link.bytes_per_s, link.source) for link in links] == [
        (("GPU0", "GPU1"), "NV4", 2e11, "measured"),
        (("GPU1", "GPU2"), "SYS", 1e9, "datasheet"),
        (("GPU2", "GPU3"), "NV4", 2e11, "measured"),
        (("GPU0", "NIC0"), "PIX", 1e9, "datasheet"),  # a copy between GPUs says nothing about a network card
        (("GPU0", "GPU1"), "PIX", 3e10, "measured"),
    ]


def test_measuring_again_replaces_and_does_not_add() -> None:
    bare = Node("a", 2, 2**34, "cpu", tuple(Device("cpu", i, "cpu", 2**33) for i in range(2)))
    once = with_measured(bare, [Link(("CPU0", "CPU1"), "SHM", 1e9, 1e-6, "measured")])
    twice = with_measured(once, [Link(("CPU0", "CPU1"), "SHM", 2e9, 1e-6, "measured")])
    assert twice.links == (Link(("CPU0", "CPU1"), "SHM", 2e9, 1e-6, "measured"),)


@given(st.integers(1, 40))
def test_every_node_is_timed_with_its_neighbours_and_few_nodes_with_all(num_nodes: int) -> None:
    pairs = node_pairs(num_nodes)
    assert len(set(pairs)) == len(pairs)
    assert all(0 <= one < other < num_nodes for one, other in pairs)
    if num_nodes <= 4:
        assert len(pairs) == num_nodes * (num_nodes - 1) // 2
        return
    assert len(pairs) == num_nodes + num_nodes // 2
    assert {(one, one + 1) for one in range(num_nodes - 1)} | {(0, num_nodes - 1)} < set(pairs)
    # Time grows with the number of nodes, not with its square.
    assert set(Counter(node for pair in pairs for node in pair).values()) <= {2, 3}


def test_a_reason_stands_once_with_the_nodes_it_is_of() -> None:
    assert merged_reasons({"a": ("one device", "no NVML")}) == ["one device", "no NVML"]
    found = {"a": ("one device",), "b": ("one device", "no NVML"), "c": ("one device", "no NVML"), "d": ("one device",)}
    assert merged_reasons(found) == ["every node: one device", "b, c: no NVML"]
    assert merged_reasons({"a": (), "b": ()}) == []


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (node("a", num_gpus=1), "links between GPUs: the node has one"),
        (node("a"), "nothing tells which pairs are linked alike"),
        (Node("a", 1, 2**30, "cpu", (Device("cpu", 0, "cpu", 2**30),)), "it has one device"),
    ],
)
def test_what_cannot_be_measured_is_said_and_not_guessed(machine: Node, reason: str) -> None:
    result = measure_links(machine)
    assert result.links == ()
    assert [said for said in result.not_measured if reason in said]


def test_gpus_are_timed_both_ways_and_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_copy(source: int, target: int) -> LinkTimes:
        if 2 in (source, target):
            raise RuntimeError("CUDA out of memory.\nTried to allocate")
        return LinkTimes(1e9 * (1 + source), 1e-6 * (1 + source))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(link_probe, "_ordinals", lambda _node: {"GPU0": 0, "GPU1": 1, "GPU2": 2})
    monkeypatch.setattr(link_probe, "time_copy", time_copy)
    assert measure_links(node("a", "NV4", "PHB", "SYS")) == LinkProbe(
        (Link(("GPU0", "GPU1"), "NV4", 1e9, 2e-6, "measured"),),
        ("PHB between GPU1 and GPU2: CUDA out of memory.", "SYS: torch does not see GPU3"),
    )
