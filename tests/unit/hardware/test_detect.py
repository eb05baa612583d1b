"""What this machine has, from an nvidia-smi, an NVML and a /sys of our own making."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.hardware import detect, nvml
from paceline.hardware.detect import only_visible, visible, with_gpus
from paceline.hardware.nvidia_smi import parse_gpus
from paceline.spec import Device, Node
from tests.topologies import load, path_of
from tests.unit.hardware.fake_sysfs import server

LISTING = """\
0, NVIDIA H100 80GB HBM3, 81559, GPU-aaaa1111-0000, 00000000:3D:00.0, 0, 4
1, NVIDIA H100 80GB HBM3, 81559, GPU-aabb2222-0000, 00000000:3E:00.0, 62, 31744
2, Tesla T4, 15360, GPU-cccc3333-0000, 00000000:A1:00.0, [N/A], [N/A]
"""
MATRIX = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\tPXB\t0-7\t0
GPU1\tNV18\t X \tSYS\tPXB\t0-7\t0
GPU2\tSYS\tSYS\t X \tSYS\t8-15\t1
NIC0\tPXB\tPXB\tSYS\t X \t\t

NIC Legend:

  NIC0: mlx5_10
"""
BARE = Node("here", 16, 2**36, "some processor")


def test_lines_become_devices() -> None:
    gpus = parse_gpus(LISTING)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[1] == Device(
        "cuda",
        1,
        "NVIDIA H100 80GB HBM3",
        81559 * 2**20,
        "GPU-aabb2222-0000",
        "0000:3e:00.0",
        busy="62 % busy, 31.0 GiB in use",
    )
    assert (gpus[0].busy, gpus[2].busy) == ("", "")
    assert parse_gpus("0, NVIDIA GB10, [N/A], GPU-dddd\n") == [Device("cuda", 0, "NVIDIA GB10", 0, "GPU-dddd")]


@pytest.mark.parametrize("listing", ["", "No devices were found\n", "NVIDIA-SMI has failed, because, of, reasons\n"])
def test_no_devices(listing: str) -> None:
    assert parse_gpus(listing) == []


@pytest.mark.parametrize(
    ("allowed", "indices"),
    [
        (None, [0, 1, 2]),
        ([], []),
        (["2"], [2]),
        (["2", "0"], [2, 0]),  # workers number them in this order
        (["GPU-cccc"], [2]),
        (["GPU-aabb2222-0000", "0"], [1, 0]),
        (["-1"], []),
        (["0", "-1", "1"], [0]),  # CUDA reads no further than the first that it does not know
        (["7", "0"], []),
        (["NoDevFiles"], []),
        (["1", "0", "1", "2"], [1, 0]),
    ],
)
def test_cuda_visible_devices(allowed: list[str] | None, indices: list[int]) -> None:
    assert [device.index for device in visible(parse_gpus(LISTING), allowed)] == indices


def test_what_is_not_visible_leaves_with_its_links_and_a_note() -> None:
    node = only_visible(load("dgx1").nodes[0], ["7", "4", "5"])
    assert [device.index for device in node.devices] == [7, 4, 5]
    assert {link.ends for link in node.links} == {("GPU4", "GPU5"), ("GPU4", "GPU7"), ("GPU5", "GPU7")}
    assert len(node.notes) == 5
    assert node.notes[0] == "GPU0 is left out: CUDA_VISIBLE_DEVICES does not name it."
    mig = only_visible(load("a100_mig").nodes[0], ["MIG-7a0e1f52-3b6d-5c1e-8a55-000000000000"])
    assert mig.devices == () and "MIG slice" in mig.notes[-1]
    in_order = only_visible(load("dgx1").nodes[0], [str(index) for index in range(8)])
    assert in_order == load("dgx1").nodes[0]


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is found first, with no GPU in sight."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(nvml, "read_gpus", nvml.Gpus)
    for name in ("CUDA_VISIBLE_DEVICES", "PACELINE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def nvidia_smi(bin_dir: Path, script: str) -> None:
    path = bin_dir / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def both_answers(listing: str = LISTING, matrix: str = MATRIX) -> str:
    return (
        f'case "$*" in *index,name,memory.total,uuid*) cat <<"END"\n{listing}END\n;;\n'
        f'"topo -m") cat <<"END"\n{matrix}END\n;; esac'
    )


def test_a_node_with_gpus(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(bin_dir, both_answers())
    cluster = detect()
    assert cluster.device_kind == "cuda"
    assert [device.name for device in cluster.devices] == ["NVIDIA H100 80GB HBM3"] * 2 + ["Tesla T4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [device.index for device in detect().devices] == [2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().device_kind == "cpu"
    assert "GPU0 is left out" in detect().nodes[0].notes[0]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    assert detect().device_kind == "cpu"
    assert detect().nodes[0].notes == ()


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'; exit 6", "true"])
def test_a_node_without_gpus_has_a_cpu_device_a_core(bin_dir: Path, script: str) -> None:
    nvidia_smi(bin_dir, script)
    cluster = detect()
    assert cluster.device_kind == "cpu"
    assert cluster.nodes[0].num_cores == len(os.sched_getaffinity(0)) == len(cluster.devices)
    assert [device.index for device in cluster.devices] == list(range(cluster.nodes[0].num_cores))
    assert 0 < sum(device.memory_bytes for device in cluster.devices) <= cluster.nodes[0].memory_bytes


def test_a_node_without_a_driver(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(bin_dir))
    assert detect().device_kind == "cpu"


def test_the_matrix_goes_before_the_tree_and_the_tree_adds_the_rest(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, both_answers())
    bus_ids = server(tmp_path / "sys")
    node = with_gpus(BARE, nvml.Gpus(), tmp_path / "sys")
    labels = {link.ends: link.label for link in node.links}
    assert labels["GPU0", "GPU1"] == "NV18"
    assert [card.name for card in node.peripherals] == ["mlx5_2", "mlx5_10", "eth0", "nvme0n1"]
    assert labels["GPU0", "NIC1"] == "PXB"  # as the matrix has mlx5_10, which is its NIC0
    assert labels["GPU0", "NIC0"] == "PIX"  # counted: the matrix does not know mlx5_2
    assert labels["GPU2", "DISK0"] == "PHB"
    assert [device.numa_node for device in node.devices] == [0, 0, 1]
    assert node.devices[2].cpus == tuple(range(32, 64))
    assert node.devices[0].pci_bus_id == bus_ids["gpu0"]
    assert (node.hostname, node.num_cores) == ("here", 16)
    assert node.notes == ("GPU2 has 8 PCIe lanes in use of 16; look at its slot.",)
    link = node.link("GPU2", "NIC2")
    assert link and link.bytes_per_s == pytest.approx(12e9 * 5 / 6)  # 8 of its lanes


def test_without_a_tree_the_matrix_tells_cards_and_cores(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, both_answers())
    node = with_gpus(BARE, nvml.Gpus(), tmp_path / "nowhere")
    assert [(card.label, card.name) for card in node.peripherals] == [("NIC0", "mlx5_10")]
    assert [device.numa_node for device in node.devices] == [0, 0, 1]
    assert node.devices[2].cpus == tuple(range(8, 16))
    assert len(node.links) == 6
    assert node.links[0].bytes_per_s == 18 * 25e9


def test_without_a_matrix_nvml_and_then_the_tree_tell(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, "exit 1")
    server(tmp_path / "sys")
    found = nvml.Gpus(tuple(parse_gpus(LISTING)), {(0, 1): "NV18"}, ("GPU2 is odd.",))
    node = with_gpus(BARE, found, tmp_path / "sys")
    labels = {link.ends: link.label for link in node.links}
    assert labels["GPU0", "GPU1"] == "NV18"
    assert labels["GPU1", "GPU2"] == "SYS"
    assert node.notes[0] == "GPU2 is odd."
    tree_alone = with_gpus(BARE, nvml.Gpus(found.devices), tmp_path / "sys")
    assert {link.ends: link.label for link in tree_alone.links}["GPU0", "GPU1"] == "PIX"


def test_nothing_known_of_a_pair_is_no_link(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, both_answers(matrix=""))
    node = with_gpus(BARE, nvml.Gpus(), tmp_path / "nowhere")
    assert len(node.devices) == 3
    assert (node.links, node.peripherals, node.notes) == ((), (), ())


def test_a_matrix_that_cannot_be_meant_is_a_note(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, both_answers(matrix=MATRIX.replace("NV18", "NV1", 1)))
    node = with_gpus(BARE, nvml.Gpus(), tmp_path / "nowhere")
    assert node.links == ()
    assert len(node.notes) == 1 and "GPU1, column GPU0" in node.notes[0]


def test_a_single_gpu_needs_no_matrix(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, both_answers(LISTING.splitlines()[0] + "\n", "would be an error\n"))
    node = with_gpus(BARE, nvml.Gpus(), tmp_path / "nowhere")
    assert (len(node.devices), node.links, node.notes) == (1, (), ())


@pytest.mark.parametrize("name", ["a100_hgx", "h200_hgx", "dgx2"])
def test_a_recorded_machine_as_if_it_were_this_one(bin_dir: Path, tmp_path: Path, name: str) -> None:
    (recorded,) = load(name).nodes
    listing = "".join(f"{gpu.index}, , 81920, GPU-{gpu.index}\n" for gpu in recorded.devices)
    nvidia_smi(bin_dir, f'case "$*" in topo*) cat {path_of(name)};; *) cat <<"END"\n{listing}END\n;; esac')
    node = with_gpus(BARE, nvml.Gpus(), tmp_path / "nowhere")
    assert node.links == recorded.links
    assert node.peripherals == recorded.peripherals
    assert [device.cpus for device in node.devices] == [device.cpus for device in recorded.devices]
