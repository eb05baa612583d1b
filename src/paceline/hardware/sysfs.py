"""What Linux says under /sys about PCIe, NUMA nodes, network cards and disks.

A PCI device is a folder below those of the bridges above it:
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0 hangs on host bridge pci0000:3a behind a root
port and the two ports of a switch. Whatever is missing or unreadable is left out: containers and virtual machines show
only a part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.hardware.cpu_list import parse_cpus
from paceline.hardware.datasheet import PcieLanes
from paceline.hardware.pci_path import PciPath
from paceline.hardware.sources import entries, read_integer, read_text
from paceline.spec import Peripheral

SYS = Path("/sys")
PORTS_PER_SWITCH = 2
"""In sysfs a switch is two folders, its upstream and downstream port; for `pci_path.distance`."""

_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class PciDevice:
    """A PCI device and its path to the processor."""

    path: PciPath
    lanes: PcieLanes | None = None
    """The speed that both ends can do, over the lanes in use; None where no PCIe lanes are reported."""
    cpus: tuple[int, ...] = ()
    missing_lanes: int = 0
    """Lanes the device has but its slot does not give."""

    @property
    def bus_id(self) -> str:
        return self.path.bridges[-1]


def pci_device(bus_id: str, root: Path = SYS) -> PciDevice | None:
    """The device "0000:3d:00.0"; None if it is not there."""
    folder = root / "bus" / "pci" / "devices" / bus_id
    return _pci_device(folder) if folder.exists() else None


def nics(root: Path = SYS) -> dict[Peripheral, PciDevice]:
    """Network cards with a place on PCI, those for RDMA first as nvidia-smi does, by name; each card's port once."""
    ports = [(f, _rdma_bytes_per_s(f)) for f in _folders(root / "class" / "infiniband")]
    ports += [(f, _ethernet_bytes_per_s(f)) for f in _folders(root / "class" / "net")]
    found: dict[Peripheral, PciDevice] = {}
    for folder, bytes_per_s in ports:
        pci = _pci_device(folder / "device")
        if pci is None or any(pci.bus_id == other.pci_bus_id for other in found):
            continue  # virtual, or the Ethernet side of a card that is already there
        nic = Peripheral("nic", f"NIC{len(found)}", folder.name, pci.bus_id, pci.path.numa_node, bytes_per_s)
        found[nic] = pci
    return found


def disks(root: Path = SYS) -> dict[Peripheral, PciDevice]:
    """NVMe disks, by name; their bytes_per_s is what their PCIe lanes carry."""
    found: dict[Peripheral, PciDevice] = {}
    for folder in _folders(root / "class" / "nvme"):
        pci = _pci_device(folder / "device")
        if pci is None:
            continue
        name = min((space.name for space in (root / "block").glob(f"{folder.name}n*")), default=folder.name)
        bytes_per_s = pci.lanes.bytes_per_s if pci.lanes else None
        disk = Peripheral("disk", f"DISK{len(found)}", name, pci.bus_id, pci.path.numa_node, bytes_per_s)
        found[disk] = pci
    return found


def _pci_device(folder: Path) -> PciDevice | None:
    try:
        place = folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    # A card may hang on a bus of its own inside a PCI device, as virtio does: the last PCI folder is the device.
    while not _BUS_ID.fullmatch(place.name):
        if place == place.parent:
            return None
        place = place.parent
    above = [level for level in (place, *place.parents) if _BUS_ID.fullmatch(level.name)]
    host_bridge = above[-1].parent.name
    numa_node = read_integer(place / "numa_node")
    path = PciPath(
        host_bridge,
        None if numa_node is None or numa_node < 0 else numa_node,
        tuple(level.name for level in reversed(above)),
    )
    lanes, missing = _lanes(place)
    return PciDevice(path, lanes, _cpus(place / "local_cpulist"), missing)


def _lanes(place: Path) -> tuple[PcieLanes | None, int]:
    """The connection of a device, and how many of its lanes are unused.

    An idle GPU lowers its speed, so the current one says nothing; the speed that the device and the port above it can
    do is what they will use. The width stays.
    """
    speeds = [_gt_per_s(folder / "max_link_speed") for folder in (place, place.parent)]
    known = [speed for speed in speeds if speed]
    width, widest = read_integer(place / "current_link_width"), read_integer(place / "max_link_width")
    if not known or not width or not 0 < width <= 32:
        return None, 0
    return PcieLanes(min(known), width), max(0, widest - width) if widest and widest <= 32 else 0


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(read_text(path))
    except ValueError:
        return ()


def _rdma_bytes_per_s(folder: Path) -> float | None:
    """The rate of its fastest port: "400 Gb/sec (4X NDR)"."""
    rates = [re.match(r"([0-9]{1,5}(?:\.[0-9]+)?) Gb/sec", read_text(port)) for port in folder.glob("ports/*/rate")]
    return max((float(rate[1]) * 1e9 / 8 for rate in rates if rate), default=None)


def _ethernet_bytes_per_s(folder: Path) -> float | None:
    """The rate of an Ethernet card, which sysfs gives in Mbit/s; -1 while the link is down."""
    megabits_per_s = read_integer(folder / "speed")
    return megabits_per_s * 1e6 / 8 if megabits_per_s and megabits_per_s > 0 else None


def _gt_per_s(path: Path) -> float | None:
    found = re.match(r"([0-9]{1,3}(?:\.[0-9]+)?) GT/s", read_text(path))
    return float(found[1]) if found else None


def _folders(path: Path) -> list[Path]:
    """Entries of a folder sorted by name, mlx5_2 before mlx5_10; none if there is no such folder."""
    return sorted(entries(path), key=lambda folder: [(len(word), word) for word in re.split(r"(\d+)", folder.name)])
