"""How much a link carries in one direction, by its label, before anybody has measured it.

NVLink, bytes/s of one link in one direction, from NVIDIA's architecture white papers, which give the sum of both
directions: P100 40 GB/s (generation 1), V100 50 (2), A100 50 (3), H100 50 (4), B200 100 (5). GA102 cards (RTX A6000,
RTX 3090, A40) have four links of 14.0625 GB/s a direction (NVIDIA Ampere GA102 GPU Architecture). The label NVk says k.

PCIe, from the constants with which NCCL plans its own rings (NVIDIA/nccl, src/graph/topo.h and topo.cc):

- PCI_BW, 12.0 GB/s for generation 3 with 16 lanes, in proportion to speed and lanes otherwise: 24 for generation 4, 48
  for 5. That is 3/4 of what the wires carry. p2pBandwidthLatencyTest has been seen to reach 54-56 GB/s on generation 5.
  It is the figure for PIX and PXB: a switch does not slow down a single pair.
- INTEL_P2P_OVERHEAD, 6/5: through a host bridge data travels in packets of 64 bytes. For PHB and NODE.
- SYS cannot exceed what joins the sockets: BDW_QPI_BW 6.0, SKL_QPI_BW 10.0 (Skylake to Ice Lake), SRP_QPI_BW 22.0
  and ERP_QPI_BW 40.0 GB/s, the slowest two-socket server that has the PCIe generation. EPYC does better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from paceline.spec import Device, Link
from paceline.spec.cluster import num_nvlinks

HOST_BRIDGE_SHARE = 5 / 6
"""Share of the PCIe bandwidth that passes a host bridge: 1 / INTEL_P2P_OVERHEAD."""
GEN3, GEN4, GEN5 = 12e9, 24e9, 48e9
"""Bytes/s of 16 PCIe lanes in one direction."""
BETWEEN_SOCKETS = {GEN3: 6e9, GEN4: 10e9, GEN5: 22e9}
"""Bytes/s between the sockets of a server, in one direction, by what its PCIe carries."""

UNKNOWN = ("", 25e9, GEN3)
"""NVLink of generations 2 to 4, the most common, and the slowest PCIe that is still in use."""

MODELS = (
    (r"P100|GP100", 20e9, GEN3),
    (r"V100|TITAN V|GV100", 25e9, GEN3),
    (r"TITAN RTX|Quadro RTX|RTX 20\d\d|T4\b", 25e9, GEN3),
    (r"\bA[138]00\b|\bA30\b", 25e9, GEN4),
    (r"RTX A\d{4}|RTX 30\d\d|\bA40\b|\bA10G?\b|\bA16\b", 14.0625e9, GEN4),
    (r"\bL4\b|\bL40S?\b|\bL20\b|Ada|RTX 40\d\d", 25e9, GEN4),
    (r"\bG?H[128]0{1,2}\b", 25e9, GEN5),
    (r"\bG?B[123]00\b", 50e9, GEN5),
    (r"Blackwell|RTX 50\d\d", 25e9, GEN5),
)
"""A regular expression for the name that the driver gives, and bytes/s of one NVLink and of PCIe in one direction."""


def link_bytes_per_s(label: str, gpu_names: Sequence[str] = ()) -> float | None:
    """Bytes/s that a link with this label carries in one direction, if it has no other load.

    Args:
        gpu_names: Of the GPUs at its ends; the slower one decides.

    Returns:
        None for X and for a label without a figure.
    """
    models = [next((model for model in MODELS if re.search(model[0], name)), UNKNOWN) for name in gpu_names]
    nvlink = min(rate for _, rate, _ in models or [UNKNOWN])
    pcie = min(rate for _, _, rate in models or [UNKNOWN])
    if count := num_nvlinks(label):
        return count * nvlink
    by_label = {"PIX": pcie, "PXB": pcie, "PHB": pcie * HOST_BRIDGE_SHARE, "NODE": pcie * HOST_BRIDGE_SHARE}
    return BETWEEN_SOCKETS[pcie] if label == "SYS" else by_label.get(label)


def links_of_pairs(
    devices: Sequence[Device], nics: Iterable[str], label_of: Callable[[str, str], str]
) -> tuple[Link, ...]:
    """A link from each device to the devices after it and to every card. `label_of`: the label of the link between two
    ends, which are `Device.label` and labels of `nics`; empty where nobody knows it, and then there is no link."""
    names = {device.label: device.name for device in devices}
    links = []
    for position, device in enumerate(devices):
        for other in (*(later.label for later in devices[position + 1 :]), *nics):
            ends = (device.label, other)
            if label := label_of(*ends):
                links.append(Link(ends, label, link_bytes_per_s(label, [names[end] for end in ends if end in names])))
    return tuple(links)
