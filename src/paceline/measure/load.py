"""Disturbances of a measurement: other programs on its CPU cores, other virtual machines, throttled GPUs.

Loads torch only to ask other workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from paceline import env
from paceline.hardware.nvml import throttled_gpus
from paceline.spec import MachineLoad

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class CpuTimes:
    """Processor seconds of one process and of the cores that it may use."""

    host: str
    cores: tuple[int, ...]
    elapsed_s: float
    own_s: float
    """The process, and its children that have ended."""
    busy_s: float
    """All programs on these cores. Interrupts are left out: no process is charged for what the network does in them."""
    stolen_s: float
    """Time in which another virtual machine ran instead of this one."""
    throttled: str = ""
    """A sentence where the GPU that the process computes on runs slower than it could."""


class LoadMeter:
    """Measures the CPU load from its creation on, and checks in the end if this worker's GPU is throttled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self._before = self._seconds()

    def _seconds(self) -> tuple[float, float, float, float]:
        everywhere = psutil.cpu_times(percpu=True)
        here = [everywhere[core] for core in self._cores if core < len(everywhere)]
        busy_s = sum(core.user + core.nice + core.system for core in here)
        return time.monotonic(), sum(os.times()[:4]), busy_s, sum(core.steal for core in here)

    def spent(self) -> CpuTimes:
        host, ordinal = os.uname().nodename, self._device.index or 0
        elapsed_s, own_s, busy_s, stolen_s = (
            now - before for now, before in zip(self._seconds(), self._before, strict=True)
        )
        throttled = throttled_gpu(host, ordinal) if self._device.type == "cuda" else ""
        return CpuTimes(host, self._cores, elapsed_s, own_s, busy_s, stolen_s, throttled)

    def load(self, group: dist.ProcessGroup | None = None) -> MachineLoad | None:
        """The load by other programs since the creation; the workers of `group` count as the measurement. A collective.

        The result is on rank 0 of the group; None on the others.
        """
        if group is None:
            return load_of([self.spent()])
        from paceline.object_collectives import gather_objects

        everybody = gather_objects(self.spent(), group, (CpuTimes,))
        return None if everybody is None else load_of(everybody)


def load_of(spent: Sequence[CpuTimes]) -> MachineLoad | None:
    """The load of the cores that others used most, from what each worker found, and every GPU that was slowed down;
    None for no workers.

    Workers that may use the same cores of a node see the same programs, and each other.
    """
    throttled = tuple(dict.fromkeys(one.throttled for one in spent if one.throttled))
    groups: dict[tuple[str, tuple[int, ...]], list[CpuTimes]] = {}
    for one in spent:
        groups.setdefault((one.host, one.cores), []).append(one)
    loads = []
    for (_, cores), found in groups.items():
        longest = max(found, key=lambda one: one.elapsed_s)
        seconds = max(longest.elapsed_s, 1e-9)
        other_s = max(0.0, longest.busy_s - sum(one.own_s for one in found))
        loads.append(MachineLoad(len(cores), other_s / seconds, max(0.0, longest.stolen_s) / seconds, throttled))
    return most_disturbed(loads)


def most_disturbed(loads: Sequence[MachineLoad | None]) -> MachineLoad | None:
    """The largest disturbance of several measurements that belong together; None if there is none."""
    return max((load for load in loads if load is not None), key=lambda load: load.disturbance, default=None)


def throttled_gpu(host: str, ordinal: int) -> str:
    """A sentence if a GPU of this process, by torch's number, runs slower than it could now; else empty.

    Where its name in CUDA_VISIBLE_DEVICES is no number, any GPU of this node counts.
    """
    visible = env.visible_gpus()
    name = str(ordinal) if visible is None else visible[ordinal]
    return "; ".join(
        f"GPU {index} of {host} ran slower than it could ({', '.join(reasons)})"
        for index, reasons in throttled_gpus().items()
        if str(index) == name or not name.isdecimal()
    )
