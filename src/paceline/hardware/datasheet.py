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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

PROTOCOL_SHARE = 0.75
"""NCCL's estimate as a share of the raw PCIe bandwidth: PCI_BW over 16 lanes of 8 GT/s."""
EIGHT_OF_TEN = 0.8
"""PCIe before generation 3 spends 2 bits of 10 on coding."""
HOST_BRIDGE_SHARE = 5 / 6
"""Share of the PCIe bandwidth that passes a host bridge: 1 / INTEL_P2P_OVERHEAD."""
BETWEEN_SOCKETS = ((8.0, 6e9), (16.0, 10e9), (32.0, 22e9), (float("inf"), 40e9))
"""PCIe speed of a server in GT/s, at most, and bytes/s between its sockets in one direction."""


@dataclass(frozen=True)
class PcieLanes:
    """The connection of one device."""

    speed_gt_per_s: float
    num_lanes: int = 16

    @property
    def bytes_per_s(self) -> float:
        """What NCCL counts on, in one direction."""
        coding = 1.0 if self.speed_gt_per_s >= 8 else EIGHT_OF_TEN
        return self.speed_gt_per_s * 1e9 / 8 * self.num_lanes * PROTOCOL_SHARE * coding


@dataclass(frozen=True)
class GpuModel:
    """What decides the bandwidth of a GPU's links."""

    name: str
    """A regular expression for the name that the driver gives."""
    nvlink_bytes_per_s: float
    """One link in one direction."""
    pcie: PcieLanes


GEN3, GEN4, GEN5 = PcieLanes(8.0), PcieLanes(16.0), PcieLanes(32.0)

UNKNOWN = GpuModel("", 25e9, GEN3)
"""NVLink of generations 2 to 4, the most common, and the slowest PCIe that is still in use."""

MODELS = (
    GpuModel(r"P100|GP100", 20e9, GEN3),
    GpuModel(r"V100|TITAN V|GV100", 25e9, GEN3),
    GpuModel(r"TITAN RTX|Quadro RTX|RTX 20\d\d|T4\b", 25e9, GEN3),
    GpuModel(r"\bA[138]00\b|\bA30\b", 25e9, GEN4),
    GpuModel(r"RTX A\d{4}|RTX 30\d\d|\bA40\b|\bA10G?\b|\bA16\b", 14.0625e9, GEN4),
    GpuModel(r"\bL4\b|\bL40S?\b|\bL20\b|Ada|RTX 40\d\d", 25e9, GEN4),
    GpuModel(r"\bG?H[128]0{1,2}\b", 25e9, GEN5),
    GpuModel(r"\bG?B[123]00\b", 50e9, GEN5),
    GpuModel(r"Blackwell|RTX 50\d\d", 25e9, GEN5),
)


@lru_cache(maxsize=64)
def model(gpu_name: str) -> GpuModel:
    """The first model whose name fits; UNKNOWN for an empty or unheard-of name."""
    return next((known for known in MODELS if re.search(known.name, gpu_name)), UNKNOWN)


def link_bytes_per_s(label: str, gpu_names: Sequence[str] = (), lanes: Sequence[PcieLanes] = ()) -> float | None:
    """Bytes/s that a link with this label carries in one direction, if it has no other load.

    Args:
        gpu_names: Of the GPUs at its ends; the slower one decides.
        lanes: PCIe connections of the devices at its ends, where they are known; the slower one decides.

    Returns:
        None for X and for a label without a figure.
    """
    models = [model(name) for name in gpu_names] or [UNKNOWN]
    if label.startswith("NV"):
        return int(label.removeprefix("NV")) * min(known.nvlink_bytes_per_s for known in models)
    slowest = min(lanes or [known.pcie for known in models], key=lambda lane: lane.bytes_per_s)
    if label in ("PIX", "PXB"):
        return slowest.bytes_per_s
    if label in ("PHB", "NODE"):
        return slowest.bytes_per_s * HOST_BRIDGE_SHARE
    if label == "SYS":
        between = next(rate for speed, rate in BETWEEN_SOCKETS if slowest.speed_gt_per_s <= speed)
        return min(slowest.bytes_per_s * HOST_BRIDGE_SHARE, between)
    return None
