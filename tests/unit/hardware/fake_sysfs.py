"""A folder like /sys with the PCI devices, cards and disks of a machine we do not have."""

from __future__ import annotations

from pathlib import Path

SWITCH = "0000:3a:00.0/0000:3b:00.0"
"""A root port and the upper port of the switch behind it."""


def add_pci(root: Path, place: str, *, numa_node: int = 0, gt_per_s: float = 16.0, width: int = 16) -> str:
    """Make the device at "pci0000:3a/…/0000:3d:00.0" and give its bus id."""
    folder = root / "devices" / place
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "numa_node": str(numa_node),
        "local_cpulist": "0-31" if numa_node == 0 else "32-63",
        "max_link_speed": f"{gt_per_s} GT/s PCIe",
        "current_link_speed": "2.5 GT/s PCIe",  # idle
        "current_link_width": str(width),
        "max_link_width": "16",
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    (folder.parent / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    link(root / "bus" / "pci" / "devices" / folder.name, folder)
    return folder.name


def add_card(root: Path, kind: str, name: str, place: str, **files: str) -> None:
    """Make class/net/eth0, class/infiniband/mlx5_0 or class/nvme/nvme0 on the device at `place`."""
    folder = root / "devices" / place / kind / name
    for file, text in files.items():
        path = folder / file.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    link(folder / "device", root / "devices" / place)
    link(root / "class" / kind / name, folder)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def server(root: Path) -> dict[str, str]:
    """Two sockets: on the first two GPUs and a card behind one switch, a GPU behind another switch, a GPU on a root
    port; on the second a GPU, a disk and an Ethernet card. Gives bus ids by name."""
    switch = f"pci0000:3a/{SWITCH}"
    places = {
        "gpu0": f"{switch}/0000:3c:00.0/0000:3d:00.0",
        "gpu1": f"{switch}/0000:3c:04.0/0000:3e:00.0",
        "gpu2": f"{switch}/0000:3c:08.0/0000:40:00.0/0000:41:00.0/0000:42:00.0",
        "gpu3": "pci0000:3a/0000:3a:01.0/0000:50:00.0",
        "gpu4": "pci0000:60/0000:60:00.0/0000:61:00.0",
        "gpu5": "pci0000:a0/0000:a0:00.0/0000:a1:00.0",
        "mlx5_2": f"{switch}/0000:3c:0c.0/0000:3f:00.0",
        "mlx5_10": f"{switch}/0000:3c:0c.0/0000:3f:00.1",
        "disk": "pci0000:a0/0000:a0:01.0/0000:a2:00.0",
        "virtio": "pci0000:a0/0000:a0:02.0",
    }
    far = ("gpu5", "disk", "virtio")
    bus_ids = {
        name: add_pci(
            root,
            place,
            numa_node=int(name in far),
            width=8 if name == "gpu5" else 4 if name == "disk" else 16,
        )
        for name, place in places.items()
    }
    add_card(root, "infiniband", "mlx5_10", places["mlx5_10"], ports__1__rate="100 Gb/sec (4X EDR)")
    add_card(root, "infiniband", "mlx5_2", places["mlx5_2"], ports__1__rate="200 Gb/sec (4X HDR)")
    add_card(root, "net", "ibp63s0", places["mlx5_2"], speed="200000")
    (root / "devices" / places["virtio"] / "virtio2").mkdir()
    add_card(root, "net", "eth0", places["virtio"] + "/virtio2", speed="-1")
    (root / "devices" / "virtual" / "net" / "lo").mkdir(parents=True)
    link(root / "class" / "net" / "lo", root / "devices" / "virtual" / "net" / "lo")
    add_card(root, "nvme", "nvme0", places["disk"], nvme0n1__size="1")
    link(root / "block" / "nvme0n1", root / "devices" / places["disk"] / "nvme" / "nvme0" / "nvme0n1")
    return bus_ids
