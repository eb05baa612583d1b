"""This node's devices and the links between them, found without loading torch.

Three sources are laid over one another: NVML says which GPUs there are, sysfs where they hang and what else hangs
there, and `nvidia-smi topo -m` how they reach each other. Any of them may be absent.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline import env
from paceline.errors import ClusterError
from paceline.hardware import nvml, sysfs
from paceline.hardware.pair_links import links_of_pairs
from paceline.hardware.pci_path import distance
from paceline.hardware.smi_matrix import parse_topology
from paceline.hardware.sources import output_of, read_text
from paceline.spec import Cluster, Device, Link, Node, Peripheral

SMI_LIMIT_S = 20.0


def detect() -> Cluster:
    """A cluster of this node alone: its GPUs if it has any, else one CPU device a core it may use.

    GPUs that the caller's CUDA_VISIBLE_DEVICES leaves out are left out, in its order, and a note says so.
    """
    num_cores = len(os.sched_getaffinity(0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu_name = _cpu_name()
    bare = Node(socket.gethostname(), num_cores, memory_bytes, cpu_name)
    if env.device_kind() != "cpu":
        node = with_gpus(bare, nvml.read_gpus(), sysfs.SYS)
        if node.devices:
            node = only_visible(node, env.visible_gpus())
        if node.devices:
            return Cluster((node,))
        bare = dataclasses.replace(bare, notes=node.notes)
    node = dataclasses.replace(bare, peripherals=(*sysfs.nics(), *sysfs.disks()))
    return Cluster((node.with_cpu_workers(num_cores),))


def with_gpus(node: Node, found: nvml.Gpus, root: Path) -> Node:
    """`node` with the GPUs that NVML found, cards, disks and the links between them; unchanged if there is no GPU.

    Args:
        root: The folder that is /sys on the node.
    """
    gpus = found.devices
    if not gpus:
        return node
    matrix, notes = _matrix() if len(gpus) > 1 else (None, ())
    places = {gpu.label: place for gpu in gpus if (place := sysfs.pci_device(gpu.pci_bus_id, root))}
    notes += tuple(
        f"{label} has {place.lanes.num_lanes} PCIe lanes in use of "
        f"{place.lanes.num_lanes + place.missing_lanes}; look at its slot."
        for label, place in places.items()
        if place.lanes and place.missing_lanes
    )
    attached = sysfs.nics(root) | sysfs.disks(root)
    peripherals = tuple(attached)
    if matrix and not any(card.kind == "nic" for card in peripherals):
        peripherals += matrix.peripherals  # a container may hide the cards from sysfs
    places |= {card.label: place for card, place in attached.items()}
    return dataclasses.replace(
        node,
        devices=tuple(_placed(gpu, places.get(gpu.label), matrix) for gpu in gpus),
        peripherals=peripherals,
        links=_links(gpus, peripherals, places, matrix, found.labels),
        notes=(*node.notes, *found.notes, *notes),
    )


def _matrix() -> tuple[Node | None, tuple[str, ...]]:
    """What `nvidia-smi topo -m` says, and a note if that is no matrix."""
    text = output_of(["nvidia-smi", "topo", "-m"], SMI_LIMIT_S) or ""
    try:
        return (parse_topology(text) if text.strip() else None), ()
    except ClusterError as problem:
        return None, (f"What nvidia-smi topo -m printed was left aside: {problem}",)


def _placed(gpu: Device, place: sysfs.PciDevice | None, matrix: Node | None) -> Device:
    """The GPU with its NUMA node and nearest cores, from sysfs or else from the matrix."""
    drawn = next((device for device in matrix.devices if device.index == gpu.index), None) if matrix else None
    numa_node = place.path.numa_node if place else None
    cpus = place.cpus if place else ()
    return dataclasses.replace(
        gpu,
        numa_node=numa_node if numa_node is not None or not drawn else drawn.numa_node,
        cpus=cpus or (drawn.cpus if drawn else ()),
    )


def _links(
    gpus: Sequence[Device],
    peripherals: Sequence[Peripheral],
    places: Mapping[str, sysfs.PciDevice],
    matrix: Node | None,
    told: Mapping[tuple[int, int], str],
) -> tuple[Link, ...]:
    """Links from each GPU to the GPUs after it and to every card and disk, as far as any source knows them."""
    numbers = {gpu.label: gpu.index for gpu in gpus}
    # The matrix orders cards in its own way, so that they are found by name.
    cards = {card.name: card.label for card in reversed(matrix.peripherals)} if matrix else {}
    in_matrix = {gpu.label: gpu.label for gpu in gpus} | {card.label: cards.get(card.name, "") for card in peripherals}

    def label_of(one: str, other: str) -> str:
        link = matrix.link(one, in_matrix[other]) if matrix else None
        label = link.label if link else told.get((numbers[one], numbers.get(other, -1)), "")
        if label or one not in places or other not in places:
            return label
        return distance(places[one].path, places[other].path, sysfs.PORTS_PER_SWITCH)

    lanes = {label: place.lanes for label, place in places.items() if place.lanes}
    return links_of_pairs(gpus, peripherals, label_of, {gpu.label: gpu.name for gpu in gpus}, lanes)


def _cpu_name() -> str:
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def only_visible(node: Node, allowed: list[str] | None) -> Node:
    """`node` with the GPUs that CUDA_VISIBLE_DEVICES lets workers see, and a note about each of the others."""
    devices = tuple(visible(node.devices, allowed))
    if devices == node.devices:
        return node
    left_out = [device.label for device in node.devices if device not in devices]
    notes = [f"{label} is left out: CUDA_VISIBLE_DEVICES does not name it." for label in left_out]
    if any(name.startswith("MIG-") for name in allowed or ()):
        notes.append("CUDA_VISIBLE_DEVICES names a MIG slice, which has no links and is not used; name whole GPUs.")
    return dataclasses.replace(
        node,
        devices=devices,
        links=tuple(link for link in node.links if not set(left_out) & set(link.ends)),
        notes=(*node.notes, *notes),
    )


def visible(gpus: Sequence[Device], allowed: list[str] | None) -> list[Device]:
    """The GPUs among `allowed` (indices or UUID prefixes); all of them for None.

    As CUDA reads its variable: in this order, and no further than the first entry that names none, or one again.
    """
    if allowed is None:
        return list(gpus)
    found: list[Device] = []
    for wanted in allowed:
        named = [
            gpu
            for gpu in gpus
            if wanted == str(gpu.index) or (wanted.startswith("GPU-") and gpu.uuid.startswith(wanted))
        ]
        if not named or named[0] in found:
            break
        found += named[:1]
    return found
