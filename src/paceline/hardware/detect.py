"""This node's devices and the links between them, found without loading torch.

NVML says which GPUs there are and how they are joined, `nvidia-smi topo -m` which network cards are near to them.
Either may be absent.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence

from paceline import __version__, env
from paceline.errors import ClusterError
from paceline.hardware.datasheet import links_of_pairs
from paceline.hardware.matrix import parse_matrix
from paceline.hardware.nvml import read_gpus
from paceline.spec import Cluster, Device, Node

SMI_LIMIT_S = 20.0


def detect() -> Cluster:
    """A cluster of this node alone: its GPUs if it has any, else one CPU device a core it may use.

    GPUs that the caller's CUDA_VISIBLE_DEVICES leaves out are left out, in its order, and a note says so.
    """
    num_cores, memory_bytes = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    node = Node(socket.gethostname(), num_cores, memory_bytes, env.cpu_name())
    if env.device_kind() != "cpu":
        gpus, labels = read_gpus()
        text = printed_or_none(["nvidia-smi", "topo", "-m"], SMI_LIMIT_S) if len(gpus) > 1 else None
        with_all = with_gpus(node, gpus, labels, text or "")
        with_gpu = only_visible(with_all, env.visible_gpus())
        if with_gpu.devices:
            return Cluster((with_gpu,))
        node = dataclasses.replace(node, notes=with_gpu.notes)
    return Cluster((node.with_cpu_workers(num_cores),))


def with_gpus(node: Node, gpus: Sequence[Device], labels: Mapping[tuple[str, str], str], matrix_text: str) -> Node:
    """`node` with what `read_gpus` found, network cards and the links between them. `matrix_text`: what `nvidia-smi
    topo -m` prints; empty where it prints nothing."""
    if not gpus:
        return node
    drawn, notes = Node("", 0, 0, ""), node.notes
    try:
        drawn = parse_matrix(matrix_text) if matrix_text.strip() else drawn
    except ClusterError as problem:
        notes += (f"What nvidia-smi topo -m printed was left aside: {problem}",)
    in_matrix = {device.label: device for device in drawn.devices}
    devices = []
    for device in gpus:  # NUMA node and cores: what NVML tells of them, or else the matrix
        beside = in_matrix.get(device.label, device)
        numa_node = beside.numa_node if device.numa_node is None else device.numa_node
        devices.append(dataclasses.replace(device, numa_node=numa_node, cpus=device.cpus or beside.cpus))

    def label_of(one: str, other: str) -> str:
        link = drawn.link(one, other)
        return link.label if link else labels.get((one, other), "")

    return dataclasses.replace(
        node,
        devices=tuple(devices),
        nics=drawn.nics,
        links=links_of_pairs(devices, drawn.nics, label_of),
        notes=(*notes, *drawn.notes),
    )


def printed_or_none(command: Sequence[str], timeout_s: float) -> str | None:
    """What a command prints; None where it is missing, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def only_visible(node: Node, allowed: list[str] | None) -> Node:
    """`node` with the GPUs that CUDA_VISIBLE_DEVICES lets workers see, and a note about each of the others."""
    devices = _visible(node.devices, allowed)
    if devices == node.devices:
        return node
    left_out = [device.label for device in node.devices if device not in devices]
    notes = [f"{label} is left out: CUDA_VISIBLE_DEVICES does not name it." for label in left_out]
    links = tuple(link for link in node.links if not set(left_out) & set(link.ends))
    return dataclasses.replace(node, devices=devices, links=links, notes=(*node.notes, *notes))


def _visible(gpus: tuple[Device, ...], allowed: list[str] | None) -> tuple[Device, ...]:
    """The GPUs among `allowed` (indices or UUID prefixes); all of them for None.

    As CUDA reads its variable: in this order, and no further than the first entry that names none, or one again.
    """
    if allowed is None:
        return gpus
    found: list[Device] = []
    for wanted in allowed:
        is_uuid = wanted.startswith("GPU-")
        named = [gpu for gpu in gpus if wanted == str(gpu.index) or (is_uuid and gpu.uuid.startswith(wanted))]
        if not named or named[0] in found:
            break
        found.append(named[0])
    return tuple(found)


def describe_node() -> dict[str, object]:
    """Versions, hardware, addresses by interface, and a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    node = dataclasses.asdict(detect().nodes[0])
    return {"versions": versions(), "node": node, "addresses": env.addresses(), "port": port}


def versions() -> dict[str, str]:
    """Versions that have to be equal on all nodes."""
    torch = importlib.metadata.version("torch")
    return {"paceline": __version__, "torch": torch, "Python": platform.python_version()}
