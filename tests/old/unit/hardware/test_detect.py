"""What this machine has, from an NVML, an nvidia-smi and a /sys of our own making."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.hardware import detect, nvml
from paceline.hardware.detect import only_visible, visible, with_gpus
from paceline.hardware.nvml import Gpus
from paceline.spec import Device, Node
from tests.data.topologies import load, path_of
from tests.unit.hardware.fake_sysfs import server

H100 = "NVIDIA H100 80GB HBM3"
GPUS = (
    Device("cuda", 0, H100, 81559 * 2**20, "GPU-aaaa1111-0000", "0000:3d:00.0"),
    Device("cuda", 1, H100, 81559 * 2**20, "GPU-aabb2222-0000", "0000:3e:00.0", busy="62 % busy, 31.0 GiB in use"),
    Device("cuda", 2, "Tesla T4", 15360 * 2**20, "GPU-cccc3333-0000", "0000:a1:00.0"),
)
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
    assert [device.index for device in visible(GPUS, allowed)] == indices


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
    monkeypatch.setattr(nvml, "read_gpus", Gpus)
    for name in ("CUDA_VISIBLE_DEVICES", "PACELINE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def nvidia_smi(bin_dir: Path, script: str) -> None:
    path = bin_dir / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def prints_matrix(bin_dir: Path, matrix: str = MATRIX) -> None:
    nvidia_smi(bin_dir, f'case "$*" in "topo -m") cat <<"END"\n{matrix}END\n;; esac')


def test_a_node_with_gpus(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints_matrix(bin_dir)
    monkeypatch.setattr(nvml, "read_gpus", lambda: Gpus(GPUS))
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


@pytest.mark.usefixtures("bin_dir")
def test_a_node_without_gpus_has_a_cpu_device_a_core() -> None:
    cluster = detect()
    assert cluster.device_kind == "cpu"
    assert cluster.nodes[0].num_cores == len(os.sched_getaffinity(0)) == len(cluster.devices)
    assert [device.index for device in cluster.devices] == list(range(cluster.nodes[0].num_cores))
    assert 0 < sum(device.memory_bytes for device in cluster.devices) <= cluster.nodes[0].memory_bytes


def test_the_matrix_goes_before_the_tree_and_the_tree_adds_the_rest(bin_dir: Path, tmp_path: Path) -> None:
    prints_matrix(bin_dir)
    bus_ids = server(tmp_path / "sys")
    node = with_gpus(BARE, Gpus(GPUS), tmp_path / "sys")
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
    prints_matrix(bin_dir)
    node = with_gpus(BARE, Gpus(GPUS), tmp_path / "nowhere")
    assert [(card.label, card.name) for card in node.peripherals] == [("NIC0", "mlx5_10")]
    assert [device.numa_node for device in node.devices] == [0, 0, 1]
    assert node.devices[2].cpus == tuple(range(8, 16))
    assert len(node.links) == 6
    assert node.links[0].bytes_per_s == 18 * 25e9


def test_without_a_matrix_nvml_and_then_the_tree_tell(bin_dir: Path, tmp_path: Path) -> None:
    nvidia_smi(bin_dir, "exit 1")
    server(tmp_path / "sys")
    found = Gpus(GPUS, {(0, 1): "NV18"}, ("GPU2 is odd.",))
    node = with_gpus(BARE, found, tmp_path / "sys")
    labels = {link.ends: link.label for link in node.links}
    assert labels["GPU0", "GPU1"] == "NV18"
    assert labels["GPU1", "GPU2"] == "SYS"
    assert node.notes[0] == "GPU2 is odd."
    tree_alone = with_gpus(BARE, Gpus(GPUS), tmp_path / "sys")
    assert {link.ends: link.label for link in tree_alone.links}["GPU0", "GPU1"] == "PIX"


def test_nothing_known_of_a_pair_is_no_link(bin_dir: Path, tmp_path: Path) -> None:
    prints_matrix(bin_dir, "")
    node = with_gpus(BARE, Gpus(GPUS), tmp_path / "nowhere")
    assert len(node.devices) == 3
    assert (node.links, node.peripherals, node.notes) == ((), (), ())


def test_a_matrix_that_cannot_be_meant_is_a_note(bin_dir: Path, tmp_path: Path) -> None:
    prints_matrix(bin_dir, MATRIX.replace("NV18", "NV1", 1))
    node = with_gpus(BARE, Gpus(GPUS), tmp_path / "nowhere")
    assert node.links == ()
    assert len(node.notes) == 1 and "GPU1, column GPU0" in node.notes[0]


def test_a_single_gpu_needs_no_matrix(bin_dir: Path, tmp_path: Path) -> None:
    prints_matrix(bin_dir, "would be an error\n")
    node = with_gpus(BARE, Gpus(GPUS[:1]), tmp_path / "nowhere")
    assert (len(node.devices), node.links, node.notes) == (1, (), ())


@pytest.mark.parametrize("name", ["a100_hgx", "h200_hgx", "dgx2"])
def test_a_recorded_machine_as_if_it_were_this_one(bin_dir: Path, tmp_path: Path, name: str) -> None:
    (recorded,) = load(name).nodes
    nvidia_smi(bin_dir, f"cat {path_of(name)}")
    gpus = tuple(Device("cuda", gpu.index, "", 2**36) for gpu in recorded.devices)
    node = with_gpus(BARE, Gpus(gpus), tmp_path / "nowhere")
    assert node.links == recorded.links
    assert node.peripherals == recorded.peripherals
    assert [device.cpus for device in node.devices] == [device.cpus for device in recorded.devices]
