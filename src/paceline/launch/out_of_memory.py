"""Whether the kernel killed a process because memory ran out, from the two places where Linux records it."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def count_oom_kills(pid: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The number of out-of-memory kills in the control group of `pid`; None if there is no counter.

    The control group of a killed process is known until the process is reaped.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        path = path.removesuffix(" (deleted)").lstrip("/")
        files = []
        if controllers == "memory":  # version 1
            files = [cgroups / "memory" / path / "memory.oom_control"]
        elif not controllers:  # version 2
            files = [cgroups / path / "memory.events", cgroups / "unified" / path / "memory.events"]
        for file in files:
            try:
                found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            except OSError:
                continue
            if found:
                return int(found.group(1))
    return None


def kernel_log_names(pid: int) -> bool:
    """Whether the kernel's log records an out-of-memory kill of `pid`; also False if the log is not readable."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    wanted = re.compile(rb"[Oo]ut of memory: Killed process %d\b" % pid)
    try:
        while True:
            if wanted.search(os.read(descriptor, 8192)):
                return True
    except OSError:  # EAGAIN at its end, EPIPE where it was overwritten meanwhile
        return False
    finally:
        os.close(descriptor)
