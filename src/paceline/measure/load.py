"""Disturbances of a measurement: other programs on its CPU cores, throttled GPUs.

Loads torch only to ask other workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline import env
from paceline.hardware.checks.gpu_facts import collect_gpus
from paceline.hardware.checks.gpu_table import throttling
from paceline.hardware.checks.load_facts import CpuTimes, cpu_times, load_of
from paceline.spec import MachineLoad

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class LoadMeter:
    """Measures the CPU load from its creation on, and checks in the end if this worker's GPU is throttled."""

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
        """The load by other programs since the creation; the workers of `group` count as the measurement. A collective.

        The result is on rank 0 of the group; None on the others.
        """
        spent = self.spent()
        if group is None:
            return None if spent is None else load_of([spent])
        from paceline.object_collectives import gather_objects

        everybody = gather_objects(spent, group, (CpuTimes,))
        return None if everybody is None else load_of([one for one in everybody if one is not None])


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
