"""`Plan`: how one job is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.spec.cluster import DeviceKind
from paceline.spec.codec import at_least, from_mapping, to_mapping


@dataclass(frozen=True)
class Plan:
    """World size, devices and how gradients are aggregated; nothing in it changes what a run learns."""

    world_size: int = at_least(1, 1)
    device_kind: DeviceKind = "cpu"
    threads_per_worker: int = at_least(1, 1)
    """CPU threads a worker computes with. A CPU device is a fixed number of threads."""
    micro_batch_size: int | None = at_least(1, None)
    """Most samples in one forward pass of a worker; None: its whole share of the global batch."""
    algorithm: Literal["all_reduce", "tree_exact"] = "all_reduce"
    timeout_s: float = at_least(1, 600.0)
    """How long a collective waits for a silent peer."""

    @property
    def backend(self) -> str:
        return "nccl" if self.device_kind == "cuda" else "gloo"

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Plan:
        return from_mapping(cls, mapping)

    def to_mapping(self) -> dict[str, Any]:
        return to_mapping(self)
