"""PCIe and NUMA from a folder like /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.hardware import sysfs
from paceline.hardware.datasheet import PcieLanes
from paceline.hardware.pci_path import PciPath, distance
from tests.unit.hardware.fake_sysfs import server


@pytest.fixture
def bus_ids(tmp_path: Path) -> dict[str, str]:
    return server(tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "label"),
    [
        ("gpu0", "gpu1", "PIX"),
        ("gpu0", "mlx5_2", "PIX"),
        ("mlx5_2", "mlx5_10", "PIX"),
        ("gpu0", "gpu2", "PXB"),
        ("gpu0", "gpu3", "PHB"),
        ("gpu3", "gpu4", "NODE"),
        ("gpu0", "gpu5", "SYS"),
        ("gpu4", "gpu5", "SYS"),
        ("gpu5", "disk", "PHB"),
        ("gpu5", "virtio", "PHB"),
    ],
)
def test_distances(tmp_path: Path, bus_ids: dict[str, str], one: str, other: str, label: str) -> None:
    ends = [sysfs.pci_device(bus_ids[name], tmp_path) for name in (one, other)]
    assert ends[0] and ends[1]
    assert distance(ends[0].path, ends[1].path, sysfs.PORTS_PER_SWITCH) == label
    assert distance(ends[1].path, ends[0].path, sysfs.PORTS_PER_SWITCH) == label


def test_host_bridges_of_an_unknown_node_are_one_node() -> None:
    assert distance(PciPath("pci0000:00", None, ("a",)), PciPath("pci0000:80", None, ("b",))) == "NODE"
    assert distance(PciPath("pci0000:00", 0, ("a",)), PciPath("pci0000:80", None, ("b",))) == "SYS"


def test_a_device(tmp_path: Path, bus_ids: dict[str, str]) -> None:
    gpu = sysfs.pci_device(bus_ids["gpu5"], tmp_path)
    assert gpu
    assert (gpu.bus_id, gpu.path.numa_node, gpu.path.root) == ("0000:a1:00.0", 1, "pci0000:a0")
    assert gpu.cpus == tuple(range(32, 64))
    assert gpu.lanes == PcieLanes(16.0, 8)  # its idle speed says nothing, nor does what the slot could do
    assert gpu.missing_lanes == 8


def test_what_is_not_there_or_unreadable(tmp_path: Path, bus_ids: dict[str, str]) -> None:
    assert sysfs.pci_device("0000:ff:00.0", tmp_path) is None
    assert sysfs.pci_device("", tmp_path) is None
    assert sysfs.nics(tmp_path / "nowhere") == sysfs.disks(tmp_path / "nowhere") == {}
    place = (tmp_path / "bus" / "pci" / "devices" / bus_ids["gpu0"]).resolve()
    for name, text in (("numa_node", "-1"), ("local_cpulist", ""), ("max_link_speed", "Unknown"), ("x", "")):
        (place / name).write_text(text)
    (place.parent / "max_link_speed").unlink()
    gpu = sysfs.pci_device(bus_ids["gpu0"], tmp_path)
    assert gpu
    assert (gpu.path.numa_node, gpu.cpus, gpu.lanes, gpu.missing_lanes) == (None, (), None, 0)


def test_cards_and_disks(tmp_path: Path, bus_ids: dict[str, str]) -> None:
    nics = list(sysfs.nics(tmp_path))
    assert [(nic.label, nic.name, nic.bytes_per_s, nic.numa_node) for nic in nics] == [
        ("NIC0", "mlx5_2", 25e9, 0),  # and not ibp63s0 once more
        ("NIC1", "mlx5_10", 12.5e9, 0),
        ("NIC2", "eth0", None, 1),
    ]
    assert nics[2].pci_bus_id == bus_ids["virtio"]
    (disk,) = sysfs.disks(tmp_path)
    assert (disk.label, disk.name, disk.pci_bus_id) == ("DISK0", "nvme0n1", bus_ids["disk"])
    assert disk.bytes_per_s == pytest.approx(6e9)


def test_this_machine_can_be_read() -> None:
    assert all(card.pci_bus_id for card in [*sysfs.nics(), *sysfs.disks()])
