"""A node's wires in words, in a table, in JSON and in a drawing."""

from __future__ import annotations

import dataclasses
import io
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.report.formats import NOTHING
from paceline.report.topology import (
    bandwidth_text,
    choice_lines,
    labels_in_use,
    node_view,
    pair_sentence,
    topology_mapping,
)
from paceline.report.topology_svg import draw_topology, spread_out, switch_link
from paceline.spec import Device, Link, Node, Peripheral
from paceline.spec.device_choice import DeviceChoice, DeviceRing
from tests.data import topologies

SVG = "{http://www.w3.org/2000/svg}"


def gpu_node(name: str) -> Node:
    return topologies.load(name).nodes[0]


def shown(node: Node, width: int = 200, ring: Sequence[int] = ()) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(node_view(node, width, ring))
    return capture.get()


def pair_node(label: str, bytes_per_s: float | None, source: str = "datasheet") -> Node:
    link = Link(("GPU0", "GPU1"), label, bytes_per_s, source="measured" if source == "measured" else "datasheet")
    return Node("a-node", 8, 2**36, "", tuple(Device("cuda", i, "", 0) for i in range(3)), (), (link,))


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("NV1", "over one NVLink"),
        ("NV18", "over 18 NVLinks"),
        ("PIX", "through one PCIe bridge"),
        ("PXB", "through several PCIe bridges without crossing a host bridge"),
        ("PHB", "through a PCIe host bridge, which is part of the CPU"),
        ("NODE", "between PCIe host bridges of one NUMA node"),
        ("SYS", "across the link between the sockets"),
    ],
)
def test_a_pair_is_one_sentence(label: str, words: str) -> None:
    sentence = pair_sentence(pair_node(label, 12e9), "GPU1", "GPU0")
    assert sentence == f"GPU 1 and GPU 0 talk {words} ({label}), about 12 GB/s."


def test_a_measured_pair_says_so_and_an_unknown_one_too() -> None:
    assert pair_sentence(pair_node("PIX", 11.26e9, "measured"), "GPU0", "GPU1").endswith("(PIX), 11.3 GB/s measured.")
    assert pair_sentence(pair_node("PIX", None), "GPU0", "GPU1").endswith("(PIX), at a bandwidth nobody knows.")
    nothing = pair_sentence(pair_node("PIX", None), "GPU0", "GPU2")
    assert nothing == "Nothing is known of the link between GPU 0 and GPU 2."


@pytest.mark.parametrize(
    ("bytes_per_s", "text"), [(12e9, "12 GB/s"), (56.25e9, "56.2 GB/s"), (450e9, "450 GB/s"), (1.8e12, "1800 GB/s")]
)
def test_bandwidths_have_three_digits(bytes_per_s: float, text: str) -> None:
    assert bandwidth_text(bytes_per_s) == text


@pytest.mark.parametrize("name", topologies.names())
def test_the_table_has_every_label_where_it_belongs(name: str) -> None:
    node = gpu_node(name)
    columns = [device.label for device in node.devices] + [part.label for part in node.peripherals]
    lines = shown(node, width=400).splitlines()
    head = next(place for place, line in enumerate(lines) if line.split() == columns)
    for device, line in zip(node.devices, lines[head + 2 :], strict=False):
        expected = [
            "X" if device.label == column else link.label if (link := node.link(device.label, column)) else NOTHING
            for column in columns
        ]
        assert line.split() == [device.label, *expected]
    for label in labels_in_use(node):
        assert any(line.startswith(f"{label} ") for line in lines), label


@pytest.mark.parametrize("width", [40, 80, 133, 200])
def test_a_narrow_terminal_cuts_no_column(width: int) -> None:
    text = shown(gpu_node("dgx2"), width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    words = text.split()
    assert all(f"GPU{i}" in words for i in range(16)) and all(f"NIC{i}" in words for i in range(10))
    assert words.count("NV6") == 16 * 15 + 1


def test_the_ring_is_marked_without_colours() -> None:
    text = shown(gpu_node("dgx1"), ring=(0, 3, 2, 1, 5, 6, 7, 4))
    assert text.count("NV2*") == 16
    assert "* a link of the ring" in text
    assert "*" not in shown(gpu_node("dgx1"))


def test_a_node_without_gpus_is_a_table_of_what_there_is() -> None:
    cards = (Peripheral("nic", "NIC0", "eth0", "0000:00:03.0", bytes_per_s=1.25e9),)
    node = Node("laptop", 2, 2**34, "a processor", tuple(Device("cpu", i, "a processor", 0) for i in range(2)), cards)
    text = shown(node)
    assert "2 cores, 16 GiB of memory, a processor" in text
    assert "eth0" in text and "1.25 GB/s" in text
    assert "No GPU was found" in text


def test_what_is_busy_and_what_was_left_out_is_shown() -> None:
    busy = dataclasses.replace(pair_node("NV4", 1e11).devices[0], busy="62 % busy [python], 31 GiB in use")
    node = dataclasses.replace(pair_node("NV4", 1e11), notes=("GPU9 is left out: nobody knows.",))
    text = shown(dataclasses.replace(node, devices=(busy, *node.devices[1:])))
    assert "62 % busy [python], 31 GiB in use" in text
    assert "GPU9 is left out: nobody knows." in text


def test_a_choice_ends_with_the_line_to_copy() -> None:
    slow, fast = Link(("GPU0", "GPU1"), "NV1", 25e9), Link(("GPU0", "GPU3"), "NV2", 50e9)
    two = choice_lines(DeviceChoice(DeviceRing((0, 3), fast), DeviceRing((0, 1), slow), is_exact=True))
    assert two == [
        "Use GPUs 0 and 3.",
        "The link between them: NV2, 50 GB/s.",
        "A naive choice, GPUs 0 and 1 in this order, would all_reduce 1 GB in 40.0 ms instead of 20.0 ms, "
        "2.00x the time: its slowest link is NV1, 25 GB/s.",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3",
    ]
    four = choice_lines(DeviceChoice(DeviceRing((0, 3, 2, 1), slow), DeviceRing((0, 1, 2, 3), slow), is_exact=False))
    assert "The best ring is 0 - 3 - 2 - 1 - 0; its slowest link is NV1, 25 GB/s." in four
    assert "A naive choice, GPUs 0, 1, 2 and 3 in this order, has a bottleneck as fast: NV1, 25 GB/s." in four
    assert any("a better one may exist" in line for line in four)
    assert four[-1] == "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3,2,1"
    alone = DeviceRing((5,), None)
    assert choice_lines(DeviceChoice(alone, alone, is_exact=True)) == [
        "Use GPU 5.",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=5",
    ]


def test_json_of_a_choice_names_pairs_bottleneck_and_ring() -> None:
    node = gpu_node("dgx1")
    ring = DeviceRing((0, 3, 2), node.link("GPU0", "GPU2"))
    mapping = topology_mapping(node, DeviceChoice(ring, ring, is_exact=True))
    assert mapping["devices"] == [0, 2, 3]
    assert mapping["ring"] == [0, 3, 2]
    assert mapping["bottleneck"] == {"label": "NV1", "bytes_per_s": 25e9}
    assert mapping["pairs"] == {"0-2": "NV1", "0-3": "NV2", "2-3": "NV2"}
    assert mapping["environment"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,3,2"}
    assert topology_mapping(node, None)["devices"] == []


# --- The drawing ---


@pytest.mark.parametrize("name", topologies.names())
def test_every_device_and_card_is_drawn_once(name: str) -> None:
    node = gpu_node(name)
    drawing = ET.fromstring(draw_topology(node, tuple(device.index for device in node.devices)))
    boxes = [group.findall(f"{SVG}text")[0].text for group in drawing.iter(f"{SVG}g") if group.get("class") != "switch"]
    nics = [part.label for part in node.peripherals if part.kind == "nic"]
    assert sorted(filter(None, boxes)) == sorted([f"GPU {device.index}" for device in node.devices] + nics)


@pytest.mark.parametrize(
    ("name", "has_switch"),
    [("dgx2", True), ("a100_hgx", True), ("dgx1", False), ("a100_mig", False), ("l40s_8gpu", False)],
)
def test_a_switch_is_drawn_where_a_gpu_has_not_that_many_links(name: str, has_switch: bool) -> None:
    node = gpu_node(name)
    drawing = ET.fromstring(draw_topology(node, ()))
    lines = [line for line in drawing.iter(f"{SVG}line") if "to-nic" not in line.get("class", "")]
    samples = [line for line in lines if "sample" in line.get("class", "")]
    n = len(node.devices)
    assert (switch_link(node) is not None) == has_switch
    assert len(lines) - len(samples) == (n if has_switch else n * (n - 1) // 2)


def test_cards_that_are_near_to_nothing_stand_where_there_is_room() -> None:
    """NIC8 and NIC9 of this machine hang on a NUMA node without GPUs; the others are in pairs at four sides."""
    drawing = ET.fromstring(draw_topology(gpu_node("a100_hgx"), range(8)))
    groups = [group for group in drawing.iter(f"{SVG}g") if group.get("class") == "nic"]
    places = {group.findall(f"{SVG}text")[0].text: group.findall(f"{SVG}rect")[0] for group in groups}
    middle = {name: (float(rect.get("x", "")), float(rect.get("y", ""))) for name, rect in places.items()}
    assert math.dist(middle["NIC8"], middle["NIC9"]) > 2 * math.dist(middle["NIC0"], middle["NIC1"])


def test_a_card_that_only_shares_the_numa_node_has_no_lines() -> None:
    drawing = ET.fromstring(draw_topology(gpu_node("h100_lost_tabs"), range(8)))
    classes = [line.get("class", "") for line in drawing.iter(f"{SVG}line")]
    assert sum(kind == "link to-nic PCIe" for kind in classes) == 8
    assert not any("host" in kind for kind in classes)


def test_names_from_a_file_do_not_become_markup() -> None:
    hostname = 'a"<script>&\x07\u202e'
    node = dataclasses.replace(gpu_node("dgx1"), hostname=hostname)
    drawing = ET.fromstring(draw_topology(node, ()))
    found = drawing.find(f"{SVG}title")
    assert found is not None and found.text == 'a"<script>&: 8 x GPU'
    assert drawing.find(f".//{SVG}script") is None


def test_nodes_with_nothing_or_one_gpu_are_drawn_too() -> None:
    for num_devices in (0, 1, 2, 17, 40):
        node = Node("n", 4, 0, "", tuple(Device("cuda", i, "", 0) for i in range(num_devices)))
        ET.fromstring(draw_topology(node, range(num_devices)))


@given(st.lists(st.floats(0, 2 * math.pi, exclude_max=True), max_size=20), st.floats(0.05, 0.6))
def test_cards_on_the_rim_keep_their_distance_and_their_order(wanted: list[float], gap: float) -> None:
    angles = spread_out(sorted(wanted), gap)
    assert len(angles) == len(wanted)
    if len(angles) > 1:
        steps = [(later - angle) % (2 * math.pi) for angle, later in zip(angles, [*angles[1:], angles[0]], strict=True)]
        assert sum(steps) == pytest.approx(2 * math.pi)
        assert min(steps) >= min(gap, 2 * math.pi / len(angles)) - 1e-9


def test_cards_with_room_stay_where_they_want_to_be() -> None:
    assert spread_out([0.5, 2.0, 4.0], 0.5) == pytest.approx([0.5, 2.0, 4.0])
    assert spread_out([2.0, 2.0], 0.5) == pytest.approx([1.75, 2.25])


def test_gpus_of_a_numa_node_are_drawn_as_a_group() -> None:
    devices = [Device("cuda", index, "A GPU", 2**30, numa_node=index // 2) for index in range(4)]
    node = Node("node0", 8, 2**30, "a processor", tuple(devices))
    drawn = draw_topology(node, ())
    assert drawn.count('<polyline class="group"') == 2
    assert "GPUs of one NUMA node, usually one socket" in drawn
    together = dataclasses.replace(node, devices=tuple(dataclasses.replace(device, numa_node=0) for device in devices))
    assert "group" not in draw_topology(together, ()).split("</style>")[1]
