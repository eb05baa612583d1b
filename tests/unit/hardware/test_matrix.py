"""Matrices of `nvidia-smi topo -m`, of many drivers and broken in many ways, and cluster files are topologies too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import ClusterError
from paceline.hardware import read_topology
from paceline.spec import Cluster, Node
from tests.data import topologies

RECORDED = topologies.names()
MATRIX = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV2\tPIX\t0-3,8-11\t0
GPU1\tNV2\t X \tSYS\t4-7\t1
NIC0\tPIX\tSYS\t X \t\t
"""


def node_of(text: str) -> Node:
    (node,) = read_topology(text + "\n").nodes
    return node


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
def test_a_recorded_machine_is_read(name: str, num_gpus: int, num_nics: int, some: dict[str, str]) -> None:
    (node,) = topologies.load(name).nodes
    assert [device.label for device in node.devices] == [f"GPU{i}" for i in range(num_gpus)]
    assert list(node.nics) == [f"NIC{i}" for i in range(num_nics)]
    assert len(node.links) == num_gpus * (num_gpus - 1) // 2 + num_gpus * num_nics
    assert labels(node).items() >= some.items()
    assert all(link.bytes_per_s for link in node.links)


@pytest.mark.parametrize("name", RECORDED)
def test_a_file_its_text_and_a_saved_cluster_give_the_same_topology(name: str, tmp_path: Path) -> None:
    cluster = topologies.load(name)
    assert cluster.device_kind == "cuda"
    assert read_topology(topologies.text_of(name)) == cluster
    cluster.save(tmp_path / "cluster.json")
    for source in (tmp_path / "cluster.json", str(tmp_path / "cluster.json"), (tmp_path / "cluster.json").read_text()):
        assert read_topology(source) == cluster
    origins = (topologies.FOLDER / "README.md").read_text()
    assert f"| {topologies.path_of(name).name} |" in origins


def test_affinities_names_and_notes_are_read() -> None:
    h200 = topologies.load("h200_hgx").nodes[0]
    assert h200.devices[0].cpus == (0, *range(2, 48), *range(96, 144))
    assert [device.numa_node for device in h200.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [*h200.nics.values()][1::7] == ["mlx5_3", "mlx5_bond_0"]
    assert {device.name for device in topologies.load("h100_hgx").devices} == {"NVIDIA H100 80GB HBM3"}
    workstation = topologies.load("workstation_nv4").nodes[0]
    assert workstation.devices[1].uuid.endswith("0001")
    assert workstation.links[0].bytes_per_s == 4 * 14.0625e9
    assert topologies.load("a100_mig").devices[0].name == "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\t", "   "),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\x1b[4m" + text.replace("NIC0\tCPU", "NIC0\x1b[0m\tCPU"),
        lambda text: "$ nvidia-smi topo -m\n" + text + "\nLegend:\n\n  X    = Self\n  NIC0: mlx5_0\n",
        lambda text: text.replace("\t", " | "),
        lambda text: "\n" + text.replace("\n", "\n\n"),
        lambda text: text + "MIG 1g.5gb  Device 0: (UUID: MIG-0)\n",
    ],
)
def test_the_same_matrix_in_another_notation(change: Callable[[str], str]) -> None:
    node = node_of(change(MATRIX))
    assert labels(node) == {"GPU0-GPU1": "NV2", "GPU0-NIC0": "PIX", "GPU1-NIC0": "SYS"}
    assert node.num_cores == 12
    assert [device.cpus for device in node.devices] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7)]
    assert [device.numa_node for device in node.devices] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "user@node:~$ nvidia-smi topo -m" + text,
        lambda text: "(base) root@3f2a:/workspace# " + text.lstrip("\t"),
        lambda text: text.replace("\tGPU0", "\t[4mGPU0", 1).replace("NUMA Affinity", "NUMA Affinity[0m"),
    ],
)
def test_a_header_behind_a_prompt_or_with_the_remains_of_its_underline_is_read(change: Callable[[str], str]) -> None:
    assert node_of(change(MATRIX)) == node_of(MATRIX)


def test_without_a_header_the_line_that_is_nearest_to_one_is_shown() -> None:
    with pytest.raises(ClusterError, match="'GPU0 GPU1 X"):
        read_topology(MATRIX.replace("\tGPU0\tGPU1", ">>> GPU0 GPU1 X", 1))


def test_an_unknown_label_is_kept_and_ranked_last_with_a_sentence() -> None:
    node = node_of(MATRIX.replace("NV2", "C2C"))
    assert labels(node)["GPU0-GPU1"] == "C2C" and node.links[0].bytes_per_s is None
    assert any("C2C" in note and "ranked last" in note for note in node.notes)
    three = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tC2C\tSYS\nGPU1\tC2C\tX\tPHB\nGPU2\tSYS\tPHB\tX\n"
    assert paceline.topo(three, pick=2).choice.ring.devices == (1, 2)  # type: ignore[union-attr]


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "topology").write_bytes(b"\xef\xbb\xbf" + MATRIX.encode())
    assert read_topology(tmp_path / "topology") == read_topology(MATRIX)


def test_gpus_keep_their_numbers_where_some_are_missing() -> None:
    node = node_of("GPU2 GPU10 CPU Affinity NUMA Affinity\nGPU2 X PIX 0 0-1\nGPU10 PIX X N/A N/A\n")
    assert [device.index for device in node.devices] == [2, 10]
    assert node.links[0].ends == ("GPU2", "GPU10")
    assert [(device.numa_node, device.cpus) for device in node.devices] == [(None, (0,)), (None, ())]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("GPU1\tNV2", "GPU1\tNV1", ["GPU1", "GPU0", "NV1", "NV2"]),
        ("NIC0\tPIX", "NIC0\tNODE", ["NIC0", "GPU0", "NODE", "PIX"]),
        ("GPU1\tNV2\t X \tSYS\t4-7\t1", "GPU1\tNV2\t X ", ["GPU1", "NIC0"]),
        ("GPU1\tNV2\t X \tSYS", "GPU1\tNV2\t X ", ["GPU1", "NIC0", "'4-7'"]),
        ("NV2\tPIX\t0-3", "nv2\tPIX\t0-3", ["GPU0", "GPU1", "'nv2'", "'NV2'"]),
        ("GPU0\t X \tNV2", "GPU0\tX\tX", ["GPU0", "GPU1", "X"]),
        ("GPU0\t X ", "GPU0\tSYS", ["GPU0"]),
        ("GPU1\tNV2\t X \tSYS\t4-7\t1\n", "", ["GPU1", "0 rows"]),
        ("GPU1\tNV2", "GPU0\tNV2", ["2 rows GPU0"]),
        ("GPU1\tNV2", "GPU7\tNV2", ["1 column and 0 rows GPU1"]),
        ("\tGPU0\tGPU1", "\tGPU0\tGPU0", ["GPU0"]),
        ("\tGPU0\tGPU1", "\tX\tGPU1", ["column"]),
        ("GPU1\tNIC0\tCPU", "GPU1\tCPU", ["0 columns and 1 row NIC0"]),
        ("0-3,8-11", "0-3,8-x", ["GPU0", "affinities"]),
        ("0-3,8-11", "11-8", ["GPU0", "affinities"]),
        ("0-3,8-11", "0-999999999", ["GPU0", "affinities"]),
        ("0-3,8-11", "٣", ["GPU0", "affinities"]),
        ("\t4-7\t1", "\t4-7\tone", ["GPU1", "'one'"]),
    ],
)
def test_a_broken_matrix_names_row_and_column(old: str, new: str, words: list[str]) -> None:
    assert old in MATRIX
    with pytest.raises(ClusterError) as caught:
        read_topology(MATRIX.replace(old, new, 1))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["nvidia-smi topo -m"]),
        (b"\xff\xfe\x00", ["nvidia-smi topo -m"]),
        (b"hello\n", ["nvidia-smi topo -m"]),
        (b"{", ["JSON"]),
        (b'{"links": []}', ["links", "paceline probe"]),
        (b'{"nodes": 3}', ["nodes"]),
        (b'{"nodes": [], "wires": 1}', ["wires"]),
        (b'{"a":' * 100_000, ["JSON"]),
    ],
)
def test_content_that_is_no_topology_names_the_file(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "topology.txt"
    path.write_bytes(content)
    with pytest.raises(ClusterError) as caught:
        read_topology(path)
    assert all(word in str(caught.value) for word in ["topology.txt", *words]), caught.value


@pytest.mark.parametrize("source", ["/nowhere/at/all", "", ".", "x" * 5000])
def test_no_such_file_is_one_sentence(source: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_topology(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


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
    "{",
    "<",
]


@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join) | st.text(max_size=200))
def test_any_text_is_read_or_refused_in_a_sentence(text: str) -> None:
    try:
        assert read_topology(text + "\n\n").devices
    except ClusterError as problem:
        assert "\n" not in str(problem)


@given(st.sampled_from(["dgx1", "h200_hgx", "a100_mig", "workstation_nv4"]), st.booleans(), st.data())
def test_any_damage_is_refused_in_a_sentence(name: str, is_saved: bool, data: st.DataObject) -> None:
    text = topologies.text_of(name)
    if is_saved:
        text = json.dumps(topologies.load(name).to_mapping(), indent=1)
    start = data.draw(st.integers(0, len(text)))
    end = start + data.draw(st.integers(0, 60))
    new = data.draw(st.sampled_from(["", " ", "\n", "SYS", "GPU0", "7", "\0", "null", "1e999", "[]", "{}", "NaN"]))
    try:
        cluster = read_topology(text[:start] + new + text[end:])
    except ClusterError:
        return
    for node in cluster.nodes:
        for link in node.links:
            found = node.link(*reversed(link.ends))
            assert found is not None and set(found.ends) == set(link.ends)


def test_a_link_of_another_rate_survives_its_file() -> None:
    node = topologies.load("workstation_nv4").nodes[0]
    slower = dataclasses.replace(node.links[0], bytes_per_s=52e9)
    cluster = Cluster((dataclasses.replace(node, links=(slower,)),))
    assert read_topology(json.dumps(cluster.to_mapping(), indent=1)) == cluster


# --- bandwidths that a datasheet gives ---


@pytest.mark.parametrize(
    ("name", "label", "gb_per_s"),
    [
        ("Tesla P100-SXM2-16GB", "NV4", 80),  # NVIDIA's white papers: 160 GB/s in both directions together
        ("Tesla V100-SXM2-32GB", "NV6", 150),
        ("NVIDIA A100-SXM4-40GB", "NV12", 300),
        ("NVIDIA A800-SXM4-80GB", "NV8", 200),
        ("NVIDIA A30", "NV4", 100),
        ("NVIDIA RTX A6000", "NV4", 56.25),
        ("NVIDIA GeForce RTX 3090", "NV4", 56.25),
        ("NVIDIA H100 80GB HBM3", "NV18", 450),
        ("NVIDIA H100 PCIe", "NV12", 300),
        ("NVIDIA H200", "NV18", 450),
        ("NVIDIA GH200 480GB", "NV18", 450),
        ("NVIDIA B200", "NV18", 900),
        ("Some GPU of tomorrow", "NV2", 50),
        ("Tesla V100-PCIE-16GB", "PXB", 12),  # the constants with which NCCL plans its rings
        ("Tesla T4", "PHB", 10),
        ("Tesla V100-PCIE-16GB", "SYS", 6),
        ("NVIDIA L40S", "PIX", 24),
        ("NVIDIA GeForce RTX 4090", "SYS", 10),
        ("NVIDIA RTX 6000 Ada Generation", "NODE", 20),
        ("NVIDIA H200", "PIX", 48),
        ("NVIDIA B200", "SYS", 22),
    ],
)
def test_the_label_and_the_model_give_the_published_bandwidth(name: str, label: str, gb_per_s: float) -> None:
    listed = "".join(f"GPU {i}: {name} (UUID: GPU-{i})\n" for i in range(2))
    (link,) = node_of(f"{listed}\tGPU0\tGPU1\nGPU0\t X \t{label}\nGPU1\t{label}\t X \n").links
    assert link.bytes_per_s == pytest.approx(gb_per_s * 1e9)


def test_the_slower_end_of_a_link_decides() -> None:
    names = ("Tesla V100-SXM2-32GB", "Tesla P100-SXM2-16GB")
    listed = "".join(f"GPU {i}: {name} (UUID: GPU-{i})\n" for i, name in enumerate(names))
    (link,) = node_of(f"{listed}\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\t X \n").links
    assert link.bytes_per_s == 40e9


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA L40S", "NVIDIA H200", "NVIDIA B200", ""])
def test_a_nearer_pci_path_is_never_slower(name: str) -> None:
    rates = []
    for label in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        listed = "".join(f"GPU {i}: {name} (UUID: GPU-{i})\n" for i in range(2))
        rates.append(node_of(f"{listed}\tGPU0\tGPU1\nGPU0 X {label}\nGPU1 {label} X\n").links[0].bytes_per_s or 0.0)
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0


# --- questions about a node ---


@pytest.mark.parametrize(
    ("pair", "words"),
    [("0,3", ["GPU0", "GPU3", "NV2", "50 GB/s"]), ("GPU0,GPU1", ["NV1", "25 GB/s"]), ("GPU5, 0", ["SYS", "socket"])],
)
def test_a_pair_is_one_sentence(pair: str, words: list[str]) -> None:
    sentence = paceline.topo(topologies.path_of("dgx1"), pair=pair).pair_sentence
    assert sentence is not None and all(word in sentence for word in words), sentence


def test_a_card_is_named_by_its_label_or_its_name() -> None:
    by_label, by_name = (
        paceline.topo(topologies.path_of("dgx2"), pair=f"0,{card}").pair_sentence for card in ("NIC0", "mlx5_0")
    )
    assert by_label is not None and by_label == by_name and "PIX" in by_label


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"pair": "0,0"}, ["0,0"]),
        ({"pair": "0"}, ["'0'"]),
        ({"pair": "0,9"}, ["9", "GPU7"]),
        ({"pair": "0,NIC3"}, ["NIC3"]),
        ({"pick": 9}, ["9", "8 GPUs"]),
    ],
)
def test_a_question_about_what_is_not_there_names_what_is(question: dict[str, str | int], words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        paceline.topo(topologies.path_of("dgx1"), **question)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_of_several_nodes_the_first_is_shown_which_says_so() -> None:
    nodes = [dataclasses.replace(topologies.load(name).nodes[0], hostname=name) for name in ("dgx1", "dgx2")]
    cluster = Cluster(tuple(nodes))
    first = paceline.topo(cluster).node
    assert first.hostname == "dgx1" and any("dgx2" in note for note in first.notes)
