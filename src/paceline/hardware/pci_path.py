"""How far apart two devices are on PCIe, from the bridges above each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PciPath:
    """The way from a processor down to a device."""

    root: str = ""
    """What the first bridge hangs on: a host bridge, or a processor where host bridges are not told apart."""
    numa_node: int | None = None
    bridges: tuple[str, ...] = ()
    """Bus ids from the top down, the device's own last."""


def distance(one: PciPath, other: PciPath, ports_per_switch: int = 1) -> str:
    """PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo -m` defines them.

    Args:
        ports_per_switch: How many entries of `bridges` a switch takes below the one that is shared: 1 where a switch is
            one entry, 2 where each of its ports is one of its own, as in sysfs.
    """
    if one.root != other.root:
        same_node = one.numa_node == other.numa_node and not one.root.startswith("cpu")
        return "NODE" if same_node else "SYS"
    shared = 0
    for mine, theirs in zip(one.bridges[:-1], other.bridges[:-1], strict=False):
        if mine != theirs:
            break
        shared += 1
    if not shared:
        return "PHB"
    deepest = max(len(one.bridges), len(other.bridges)) - shared
    return "PIX" if deepest <= ports_per_switch else "PXB"
