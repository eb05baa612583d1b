"""`Cluster`: the machines, devices and wires a job can run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """One device that can hold one worker."""

    kind: DeviceKind
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Cluster:
    """One node, for now: its devices, cores and memory. On a node without GPUs the devices are CPU workers."""

    hostname: str
    num_cores: int
    memory_bytes: int
    cpu_name: str
    devices: tuple[Device, ...] = ()

    @property
    def device_kind(self) -> DeviceKind:
        return self.devices[0].kind if self.devices else "cpu"
