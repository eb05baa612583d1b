"""Matrices of nvidia-smi, of many drivers and broken in many ways."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ClusterError
from paceline.hardware.smi_matrix import parse_topology
from paceline.spec import Node
from tests.data.topologies import load, names, text_of

MATRIX = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV2\tPIX\t0-3,8-11\t0
GPU1\tNV2\t X \tSYS\t4-7\t1
NIC0\tPIX\tSYS\t X \t\t
"""


def labels(node: Node) -> dict[str, str]:
    return {"-".join(link.ends): link.label for link in node.links}


@pytest.mark.parametrize(
    ("name", "num_gpus", "num_nics", "some"),
    [
        ("dgx1", 8, 0, {"GPU0-GPU3": "NV2", "GPU0-GPU1": "NV1", "GPU0-GPU5": "SYS", "GPU6-GPU7": "NV2"}),
        ("dgx2", 16, 10, {"GPU0-GPU15": "NV6", "GPU0-NIC0": "PIX", "GPU2-NIC0": "PXB", "GPU4-NIC0": "NODE"}),
        ("a100_hgx", 8, 10, {"GPU0-GPU7": "NV12", "GPU2-NIC3": "PXB", "GPU2-NIC9": "SYS"}),
        ("a100_mig", 4, 0, {"GPU0-GPU3": "NV4"}),
        ("h100_hgx", 8, 8, {"GPU3-GPU4": "NV18", "GPU5-NIC5": "PIX", "GPU5-NIC6": "NODE", "GPU5-NIC0": "SYS"}),
        ("h100_lost_tabs", 8, 12, {"GPU5-NIC9": "PXB", "GPU5-NIC8": "NODE", "GPU7-NIC11": "PXB", "GPU1-NIC3": "PXB"}),
        ("h200_hgx", 8, 9, {"GPU0-NIC8": "NODE", "GPU7-NIC7": "PIX"}),
        ("l40s_4gpu", 4, 2, {"GPU0-GPU1": "NODE", "GPU1-GPU2": "SYS", "GPU2-NIC1": "NODE"}),
        ("l40s_8gpu", 8, 2, {"GPU0-GPU1": "PIX", "GPU0-GPU3": "NODE", "GPU3-GPU4": "SYS"}),
        ("rtx4090_8gpu", 8, 2, {"GPU0-GPU1": "SYS", "GPU6-NIC1": "PHB"}),
        ("mixed_5gpu", 5, 0, {"GPU1-GPU2": "PHB", "GPU2-GPU3": "NODE", "GPU0-GPU4": "SYS"}),
        ("pcie_8gpu_switches", 8, 1, {"GPU0-GPU1": "PIX", "GPU1-GPU2": "PXB", "GPU3-GPU4": "SYS", "GPU7-NIC0": "PHB"}),
        ("pcie_4gpu", 4, 0, {"GPU0-GPU1": "PIX", "GPU1-GPU2": "PHB"}),
        ("workstation_nv4", 2, 0, {"GPU0-GPU1": "NV4"}),
    ],
)
def test_recorded_machines(name: str, num_gpus: int, num_nics: int, some: dict[str, str]) -> None:
    (node,) = load(name).nodes
    assert [device.label for device in node.devices] == [f"GPU{i}" for i in range(num_gpus)]
    assert [card.label for card in node.peripherals] == [f"NIC{i}" for i in range(num_nics)]
    assert len(node.links) == num_gpus * (num_gpus - 1) // 2 + num_gpus * num_nics
    assert labels(node).items() >= some.items()
    assert all(link.bytes_per_s and link.source == "datasheet" for link in node.links)


def test_affinities_names_and_legend() -> None:
    h200 = load("h200_hgx").nodes[0]
    assert h200.devices[0].cpus == (0, *range(2, 48), *range(96, 144))
    assert [device.numa_node for device in h200.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [card.name for card in h200.peripherals][1::7] == ["mlx5_3", "mlx5_bond_0"]
    assert h200.num_cores == 191  # one core in no GPU's list
    assert [card.name for card in load("dgx2").nodes[0].peripherals][:2] == ["mlx5_0", "mlx5_1"]
    assert {device.name for device in load("h100_hgx").devices} == {"NVIDIA H100 80GB HBM3"}
    workstation = load("workstation_nv4").nodes[0]
    assert workstation.devices[1].uuid.endswith("0001")
    assert workstation.links[0].bytes_per_s == 4 * 14.0625e9


def test_mig_slices_are_a_note() -> None:
    assert load("a100_mig").nodes[0].notes == (
        "GPU0 is split into 2 MIG devices (3g.20gb, 3g.20gb), which have no links.",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\t", "   "),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\x1b[4m" + text.replace("NIC0\tCPU", "NIC0\x1b[0m\tCPU"),
        lambda text: "$ nvidia-smi topo -m\n" + text + "\nLegend:\n\n  X    = Self\n  NIC0: mlx5_0\n",
        lambda text: text.replace("\t", " | "),
        lambda text: "\n" + text.replace("\n", "\n\n"),
        lambda text: text.replace("SYS", "SOC"),
        lambda text: text + "MIG 1g.5gb  Device 0: (UUID: MIG-0)\n",
    ],
)
def test_the_same_matrix_in_another_dress(change: object) -> None:
    assert callable(change)
    node = parse_topology(change(MATRIX))
    assert labels(node) == {"GPU0-GPU1": "NV2", "GPU0-NIC0": "PIX", "GPU1-NIC0": "SYS"}
    assert node.num_cores == 12
    assert node.devices[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert [device.numa_node for device in node.devices] == [0, 1]


def test_gpus_keep_their_numbers_where_some_are_missing() -> None:
    node = parse_topology("GPU2 GPU10 CPU Affinity NUMA Affinity\nGPU2 X PIX 0 0-1\nGPU10 PIX X N/A N/A\n")
    assert [device.index for device in node.devices] == [2, 10]
    assert node.links[0].ends == ("GPU2", "GPU10")
    assert [device.numa_node for device in node.devices] == [None, None]
    assert [device.cpus for device in node.devices] == [(0,), ()]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("GPU1\tNV2", "GPU1\tNV1", ["GPU1", "GPU0", "NV1", "NV2", "both directions"]),
        ("NIC0\tPIX", "NIC0\tNODE", ["NIC0", "GPU0", "NODE", "PIX"]),
        ("GPU1\tNV2\t X \tSYS\t4-7\t1", "GPU1\tNV2\t X ", ["GPU1", "NIC0", "2 cells for 3 columns"]),
        ("GPU1\tNV2\t X \tSYS", "GPU1\tNV2\t X ", ["GPU1", "NIC0", "'4-7'"]),
        ("NV2\tPIX\t0-3", "NV19\tPIX\t0-3", ["GPU0", "GPU1", "'NV19'"]),
        ("NV2\tPIX\t0-3", "nv2\tPIX\t0-3", ["GPU0", "GPU1", "'nv2'"]),
        ("GPU0\t X \tNV2", "GPU0\tX\tX", ["GPU0", "GPU1", "X"]),
        ("GPU0\t X ", "GPU0\tSYS", ["GPU0", "column GPU0"]),
        ("GPU1\tNV2\t X \tSYS\t4-7\t1\n", "", ["GPU1", "no row"]),
        ("GPU1\tNV2", "GPU0\tNV2", ["two rows GPU0"]),
        ("GPU1\tNV2", "GPU7\tNV2", ["row GPU7", "no column"]),
        ("\tGPU0\tGPU1", "\tGPU0\tGPU0", ["2 columns GPU0"]),
        ("\tGPU0\tGPU1", "\tX\tGPU1", ["column names"]),
        ("GPU1\tNIC0\tCPU", "GPU1\tCPU", ["row NIC0", "no column"]),
        ("0-3,8-11", "0-3,8-x", ["GPU0", "CPU Affinity"]),
        ("0-3,8-11", "11-8", ["GPU0", "CPU Affinity"]),
        ("0-3,8-11", "0-999999999", ["GPU0", "CPU Affinity"]),
        ("\t4-7\t1", "\t4-7\tone", ["GPU1", "NUMA Affinity"]),
        ("\t4-7\t1", "\t4-7\t1\t1", ["GPU1", "NUMA Affinity", "'1'"]),
    ],
)
def test_a_broken_matrix_is_one_sentence_with_row_and_column(old: str, new: str, words: list[str]) -> None:
    assert old in MATRIX
    with pytest.raises(ClusterError) as caught:
        parse_topology(MATRIX.replace(old, new, 1))
    assert all(word in str(caught.value) for word in words), caught.value


WORDS = [
    "GPU0",
    "GPU1",
    "X",
    "NV2",
    "NV99",
    "SYS",
    "NIC0",
    "mlx5_0",
    "CPU",
    "Affinity",
    "0-3",
    "|",
    "\t",
    "\n",
    "\x1b[4m",
]


@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join) | st.text(max_size=200))
@settings(deadline=None)
def test_no_text_is_a_traceback(text: str) -> None:
    try:
        node = parse_topology(text)
    except ClusterError:
        return
    assert node.devices


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_no_damage_to_a_recorded_matrix_is_a_traceback(data: st.DataObject) -> None:
    text = text_of(data.draw(st.sampled_from([name for name in names() if name.startswith(("dgx1", "h2", "a100_m"))])))
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 60))
    text = text[:start] + data.draw(st.sampled_from(["", " ", "\n", "SYS", "GPU0", "7", "\0"])) + text[start + length :]
    try:
        node = parse_topology(text)
    except ClusterError:
        return
    for link in node.links:
        assert node.link(*reversed(link.ends)) == link
