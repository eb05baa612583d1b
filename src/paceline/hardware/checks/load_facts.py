"""What the processors of a node are busy with."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.spec import MachineLoad

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of the cores that this process may use, since some time in the past."""

    cores: tuple[int, ...]
    busy_s: float
    """Processor time of all programs on these cores."""
    stolen_s: float
    """Time in which another virtual machine ran instead of this one."""


def processor_times(stat: Path = STAT) -> ProcessorTimes | None:
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
    return ProcessorTimes(cores, busy / per_s, sum(row[7] for row in ticks) / per_s)


def collect_load(seconds: float = 0.5, stat: Path = STAT) -> MachineLoad | None:
    """What other programs and other virtual machines do while this process looks on for a moment."""
    before, began_s = processor_times(stat), time.monotonic()
    time.sleep(seconds)
    after = processor_times(stat)
    if before is None or after is None:
        return None
    passed_s = time.monotonic() - began_s
    return MachineLoad(
        len(after.cores),
        max(0.0, after.busy_s - before.busy_s) / passed_s,
        max(0.0, after.stolen_s - before.stolen_s) / passed_s,
    )
