"""What this machine has, from an nvidia-smi of our own making."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.hardware import detect
from paceline.hardware.detect import parse_gpus, visible
from paceline.spec import Device

LISTING = """\
0, NVIDIA H100 80GB HBM3, 81559, GPU-aaaa1111-0000
1, NVIDIA H100 80GB HBM3, 81559, GPU-aabb2222-0000
2, Tesla T4, 15360, GPU-cccc3333-0000
"""


def test_lines_become_devices_and_uuids() -> None:
    assert parse_gpus(LISTING)[2] == (Device("cuda", 2, "Tesla T4", 15360 * 2**20), "GPU-cccc3333-0000")
    assert [device.index for device, _ in parse_gpus(LISTING)] == [0, 1, 2]


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
    ],
)
def test_cuda_visible_devices(allowed: list[str] | None, indices: list[int]) -> None:
    assert [device.index for device in visible(parse_gpus(LISTING), allowed)] == indices


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is found first, with no GPU in sight."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "PACELINE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def nvidia_smi(bin_dir: Path, script: str) -> None:
    path = bin_dir / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_node_with_gpus(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(bin_dir, f'case "$*" in *index,name,memory.total,uuid*) cat <<END\n{LISTING}END\n;; esac')
    cluster = detect()
    assert cluster.device_kind == "cuda"
    assert [device.name for device in cluster.devices] == ["NVIDIA H100 80GB HBM3"] * 2 + ["Tesla T4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [device.index for device in detect().devices] == [2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().device_kind == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    assert detect().device_kind == "cpu"


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
