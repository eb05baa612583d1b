"""The CPU load of a node: by this program, by other programs, by other virtual machines."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.spec import MachineLoad

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CpuTimes:
    """Processor seconds of one process and of the cores that it may use, since some time in the past."""

    host: str
    cores: tuple[int, ...]
    at_s: float
    own_s: float
    """The process, and its children that have ended."""
    busy_s: float
    """Processor time of all programs on these cores."""
    stolen_s: float
    """Time in which another virtual machine ran instead of this one."""
    throttled: str = ""
    """A sentence where the GPU that the process computes on runs slower than it could."""

    def since(self, before: CpuTimes) -> CpuTimes:
        return replace(
            self,
            at_s=self.at_s - before.at_s,
            own_s=self.own_s - before.own_s,
            busy_s=self.busy_s - before.busy_s,
            stolen_s=self.stolen_s - before.stolen_s,
        )


def cpu_times(stat: Path = STAT) -> CpuTimes | None:
    """The times until now; None where the system does not tell them."""
    try:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        lines = [line.split() for line in stat.read_text().splitlines()]
    except (AttributeError, OSError):  # not on Linux
        return None
    names = {f"cpu{core}" for core in cores}
    ticks = [[float(field) for field in fields[1:9]] for fields in lines if fields and fields[0] in names]
    if not ticks or any(len(row) < 8 for row in ticks):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal: proc(5). Guests count as user; what the network does in
    # interrupts is left out, because no process is charged for it and it is mostly the measurement's.
    busy = sum(user + nice + system for user, nice, system, *_ in ticks)
    per_s = os.sysconf("SC_CLK_TCK")
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    stolen_s = sum(row[7] for row in ticks) / per_s
    return CpuTimes(os.uname().nodename, cores, time.monotonic(), own_s, busy / per_s, stolen_s)


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


def most_disturbed(loads: Sequence[MachineLoad | None]) -> MachineLoad | None:
    """The largest disturbance of several measurements that belong together; None if there is none."""
    return max((load for load in loads if load is not None), key=lambda load: load.disturbance, default=None)


def collect_load(seconds: float = 0.5, stat: Path = STAT) -> MachineLoad | None:
    """The CPU time that other programs and virtual machines use during `seconds`; None if /proc does not tell it."""
    before = cpu_times(stat)
    time.sleep(seconds)
    after = cpu_times(stat)
    return None if before is None or after is None else load_of([after.since(before)])
