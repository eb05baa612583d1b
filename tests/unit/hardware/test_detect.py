"""What this machine has, from a stand-in for NVML and an `nvidia-smi` of our own making."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.hardware import detect
from paceline.hardware.detect import versions, with_gpus
from paceline.hardware.nvml import read_gpus
from paceline.spec import Node
from tests.data import topologies
from tests.unit.hardware.fake_nvml import FOUR_GPUS, GIB, FakeNvml, NVMLError

BARE = Node("here", 16, 2**36, "some processor")
MATRIX = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\tPXB\t0-7\t0
GPU1\tNV18\t X \tSYS\tPXB\t0-7\t0
GPU2\tSYS\tSYS\t X \tSYS\t8-15\t1
NIC0\tPXB\tPXB\tSYS\t X \t\t

NIC Legend:

  NIC0: mlx5_10
"""


def answers(num_gpus: int = 3, **changes: Any) -> dict[str, Any]:
    """Two H100 and a T4, or as many GPUs as are asked for, without NVLinks that NVML tells."""
    bus_ids = ["00000000:3D:00.0", "00000000:3E:00.0", "00000000:A1:00.0"]
    known: dict[str, Any] = {
        "nvmlDeviceGetName": lambda gpu: "Tesla T4" if gpu == 2 and num_gpus == 3 else "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{'abc'[gpu % 3] * 4}{gpu}",
    }
    if num_gpus == 3:
        known["nvmlDeviceGetPciInfo"] = lambda gpu: type("Info", (), {"busId": bus_ids[gpu]})
    return known | changes


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is found first, with an `nvidia-smi` that knows nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "PACELINE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    prints(folder, "exit 1")
    return folder


def prints(bin_dir: Path, script: str) -> None:
    path = bin_dir / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def node_with(fake: FakeNvml, matrix: str = "") -> Node:
    """The node that detection makes of GPUs and a matrix."""
    return with_gpus(BARE, *read_gpus(fake), matrix)


def labels(node: Node) -> dict[tuple[str, str], str]:
    return {link.ends: link.label for link in node.links}


# --- NVML alone ---


def test_nvml_tells_devices_memory_use_and_links() -> None:
    fake = FakeNvml(4, FOUR_GPUS)
    node = node_with(fake)
    assert fake.num_open == 0
    assert [(gpu.name, gpu.uuid, gpu.pci_bus_id) for gpu in node.devices] == [
        (f"NVIDIA A100 {i}", f"GPU-{i}", f"0000:0{6 + i}:00.0") for i in range(4)
    ]
    assert {gpu.memory_bytes for gpu in node.devices} == {40 * GIB}
    assert [bool(gpu.busy) for gpu in node.devices] == [False, True, False, False]
    assert "62 %" in node.devices[1].busy and "31" in node.devices[1].busy
    told = {"-".join(pair): label for pair, label in labels(node).items()}
    assert told["GPU0-GPU1"] == "NV2" and told["GPU2-GPU3"] == "NV4"
    assert told["GPU0-GPU3"] == told["GPU1-GPU2"] == "PXB" and told["GPU0-GPU2"] == told["GPU1-GPU3"] == "SYS"


@pytest.mark.parametrize("mute", [*FOUR_GPUS, "nvmlShutdown"])
def test_one_query_without_an_answer_leaves_the_others_as_they_are(mute: str) -> None:
    whole, node = (node_with(FakeNvml(4, FOUR_GPUS | changes)) for changes in ({}, {mute: NVMLError("Not Supported")}))
    assert [gpu.index for gpu in node.devices] == [0, 1, 2, 3]
    same = [
        getattr(one, name) == getattr(other, name)
        for one, other in zip(whole.devices, node.devices, strict=True)
        for name in ("name", "uuid", "pci_bus_id", "memory_bytes", "busy")
    ]
    assert same.count(False) <= 5  # one field of four GPUs; memory is also half of one sentence


@pytest.mark.parametrize("mute", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_answer_has_no_gpus(mute: str) -> None:
    assert node_with(FakeNvml(4, FOUR_GPUS | {mute: NVMLError("Driver Not Loaded")})) == BARE


@pytest.mark.parametrize(
    ("percent", "used_bytes", "words"),
    [
        (0, 0, []),
        (9, GIB - 1, []),
        (10, 0, ["10 %"]),
        (0, GIB, ["1.0 GiB"]),
        (50, 3 * GIB, ["50 %", "3.0 GiB"]),
    ],
)
def test_a_gpu_is_busy_from_a_tenth_of_its_time_or_a_gibibyte_on(
    percent: int, used_bytes: int, words: list[str]
) -> None:
    known = {
        "nvmlDeviceGetUtilizationRates": lambda _: type("Rates", (), {"gpu": percent}),
        "nvmlDeviceGetMemoryInfo": lambda *_: type("Memory", (), {"total": 40 * GIB, "used": used_bytes}),
    }
    (gpu,), _ = read_gpus(FakeNvml(1, known))
    assert bool(gpu.busy) == bool(words) and all(word in gpu.busy for word in words)


def test_without_the_python_module_there_are_no_gpus(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect().device_kind == "cpu"


# --- with a matrix ---


def test_the_matrix_goes_before_the_driver_and_adds_cards_and_cores() -> None:
    places: dict[str, Any] = {
        "nvmlDeviceGetCpuAffinity": lambda gpu, _: [0b1111 << 8] if gpu == 2 else [],
        "nvmlDeviceGetMemoryAffinity": lambda gpu, *_: [0, 0b10] if gpu == 2 else [0b11],
        "nvmlDeviceGetTopologyCommonAncestor": 50,
    }
    node = node_with(FakeNvml(3, answers(**places)), MATRIX)
    assert labels(node)["GPU0", "GPU1"] == "NV18" and labels(node)["GPU0", "NIC0"] == "PXB"
    assert node.nics == {"NIC0": "mlx5_10"}
    assert [device.numa_node for device in node.devices] == [0, 0, 65]  # what the driver tells goes first
    assert [device.cpus for device in node.devices] == [tuple(range(8)), tuple(range(8)), (8, 9, 10, 11)]
    assert node.links[0].bytes_per_s == 18 * 25e9
    slow = node.link("GPU2", "NIC0")
    assert slow is not None and slow.bytes_per_s == 6e9  # a T4 behind the link between sockets
    assert node.devices[0].pci_bus_id == "0000:3d:00.0"


def test_nothing_known_of_a_pair_is_no_link() -> None:
    node = node_with(FakeNvml(3, answers()))
    assert (len(node.devices), node.links, node.nics, node.notes) == (3, (), {}, ())


def test_an_invalid_matrix_is_a_note() -> None:
    node = node_with(FakeNvml(3, answers()), MATRIX.replace("NV18", "NV1", 1))
    (note,) = node.notes
    assert node.links == () and "GPU1" in note and "GPU0" in note


@pytest.mark.parametrize("name", ["a100_hgx", "h200_hgx", "dgx2"])
def test_a_recorded_machine_as_if_it_were_this_one(bin_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (recorded,) = topologies.load(name).nodes
    prints(bin_dir, f'[ "$*" = "topo -m" ] && cat {topologies.path_of(name)}')
    fake = FakeNvml(len(recorded.devices), {"nvmlDeviceGetName": lambda gpu: recorded.devices[gpu].name})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    (node,) = detect().nodes
    assert labels(node) == labels(recorded)
    assert node.nics == recorded.nics
    assert [device.cpus for device in node.devices] == [device.cpus for device in recorded.devices]


# --- what a worker may see ---


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2", [2]),
        ("2,0", [2, 0]),  # workers number them in this order
        ("GPU-cccc", [2]),
        ("GPU-bbbb1, 0", [1, 0]),
        ("-1", []),
        ("0,-1,1", [0]),  # CUDA reads no further than the first that it does not know
        ("7,0", []),
        ("NoDevFiles", []),
        ("1,0,1,2", [1, 0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, indices: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(3, answers()))
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    node = paceline.topo().node
    seen = [device.index for device in node.devices if device.kind == "cuda"]
    assert seen == indices
    assert node.device_kind == ("cuda" if indices else "cpu")
    left_out = [note for note in node.notes if "CUDA_VISIBLE_DEVICES" in note]
    assert len(left_out) == 3 - len(indices)


def test_the_user_may_force_the_cpu(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(3, answers()))
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    cluster = detect()
    assert (cluster.device_kind, cluster.nodes[0].notes) == ("cpu", ())


def test_a_node_without_gpus_has_a_cpu_device_a_core(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (node,) = detect().nodes
    assert node.num_cores == len(os.sched_getaffinity(0)) == len(node.devices)
    assert [device.index for device in node.devices] == list(range(node.num_cores))
    assert 0 < sum(device.memory_bytes for device in node.devices) <= node.memory_bytes


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "2.13.0"}.__getitem__)
    assert versions()["paceline"] == paceline.__version__
