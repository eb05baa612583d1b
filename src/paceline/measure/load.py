"""What disturbs a measurement: other programs on its processors, GPUs that are slowed down.

Loads torch only to ask other workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import env
from paceline.hardware.checks.gpu_facts import collect_gpus
from paceline.hardware.checks.gpu_table import throttling
from paceline.hardware.checks.load_facts import STAT, processor_times
from paceline.spec import MachineLoad

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class CpuTimes:
    """Processor seconds of one worker and of the cores that it may use, since some time in the past."""

    host: str
    cores: tuple[int, ...]
    at_s: float
    own_s: float
    busy_s: float
    """Processor time of all programs on these cores."""
    stolen_s: float
    """Time in which another virtual machine ran instead of this one."""
    throttled: str = ""
    """A sentence where the worker's GPU runs slower than it could."""

    def since(self, before: CpuTimes) -> CpuTimes:
        return replace(
            self,
            at_s=self.at_s - before.at_s,
            own_s=self.own_s - before.own_s,
            busy_s=self.busy_s - before.busy_s,
            stolen_s=self.stolen_s - before.stolen_s,
        )


def cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """The times until now, its ended children's among its own; None where the system does not tell them."""
    times = processor_times(stat)
    if times is None:
        return None
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    return CpuTimes(os.uname().nodename, times.cores, time.monotonic(), own_s, times.busy_s, times.stolen_s)


def load_of(spent: Sequence[CpuTimes]) -> MachineLoad | None:
    """The load of the cores that others used most, from what each worker found, and every GPU that was slowed down;
    None where no worker could tell.

    Workers that may use the same cores of a node see the same programs, and each other.
    """
    throttled = tuple(dict.fromkeys(one.throttled for one in spent if one.throttled))
    groups: dict[tuple[str, tuple[int, ...]], list[CpuTimes]] = {}
    for one in spent:
        groups.setdefault((one.host, one.cores), []).append(one)
    loads = []
    for (_, cores), found in groups.items():
        longest = max(found, key=lambda one: one.at_s)
        other_s = longest.busy_s - sum(one.own_s for one in found)
        seconds = max(longest.at_s, 1e-9)
        stolen_s = max(0.0, longest.stolen_s)
        loads.append(MachineLoad(len(cores), max(0.0, other_s) / seconds, stolen_s / seconds, throttled))
    return most_disturbed(loads)


class LoadMeter:
    """Watches the processors from its making on, and in the end the GPU that this worker computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = cpu_times()

    def spent(self) -> CpuTimes | None:
        now = cpu_times()
        if now is None or self._before is None:
            return None
        ordinal = self._device.index or 0
        throttled = throttled_gpu(now.host, ordinal) if self._device.type == "cuda" else ""
        return replace(now.since(self._before), throttled=throttled)

    def load(self, group: dist.ProcessGroup | None = None) -> MachineLoad | None:
        """What others did meanwhile, with the workers of `group` counted as the measurement; a collective.

        The result is on rank 0 of the group; None on the others.
        """
        spent = self.spent()
        if group is None:
            return None if spent is None else load_of([spent])
        from paceline.object_collectives import gather_objects

        everybody = gather_objects(spent, group, (CpuTimes,))
        return None if everybody is None else load_of([one for one in everybody if one is not None])


def most_disturbed(loads: Sequence[MachineLoad | None]) -> MachineLoad | None:
    """The load that disturbed more, of several measurements that belong together."""
    return max((load for load in loads if load is not None), key=lambda load: load.disturbance, default=None)


def throttled_gpu(host: str, ordinal: int) -> str:
    """A sentence if a GPU of this process, by torch's number, runs slower than it could now; else empty.

    Where its name in CUDA_VISIBLE_DEVICES is no number, any GPU of this node counts.
    """
    visible = env.visible_gpus()
    name = str(ordinal) if visible is None else visible[ordinal]
    return "; ".join(
        f"GPU {gpu.index} of {host} ran slower than it could ({', '.join(reasons)})"
        for gpu in collect_gpus().gpus
        if (str(gpu.index) == name or not name.isdecimal()) and (reasons := throttling(gpu))
    )
