"""Facts about versions, processor and limits of a node."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from paceline.hardware.checks.load_facts import collect_load
from paceline.hardware.cpu_list import parse_cpus
from paceline.hardware.sources import read_text
from paceline.spec import MachineLoad


@dataclass(frozen=True)
class ProcessLimit:
    """A limit as `ulimit` shows it; None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class SystemFacts:
    """What the operating system tells of a node."""

    versions: dict[str, str] = field(default_factory=dict)
    """Versions by name: paceline, python, torch, and CUDA and NCCL where torch brings them."""
    num_cores: int = 1
    """Cores that this process may run on."""
    quota_cores: float | None = None
    """Processor time a container may use, in cores; None: no limit."""
    threads_per_core: int = 1
    governor: str = ""
    scaling_driver: str = ""
    limits: dict[str, ProcessLimit] = field(default_factory=dict)
    """Limits by their names in `ulimit`: nofile, nproc, memlock."""
    load: MachineLoad | None = None
    """What other programs do on these cores; None: unknown."""

    @property
    def real_cores(self) -> int:
        return self.num_cores // self.threads_per_core

    @property
    def quota_workers(self) -> int:
        """Workers that the quota has a whole core for, one at least."""
        return max(1, int(self.quota_cores or 0))


def collect_system() -> SystemFacts:
    """Read what there is; what cannot be read keeps its default."""
    cpu = Path("/sys/devices/system/cpu/cpu0")
    return SystemFacts(
        versions=collect_versions(),
        num_cores=len(os.sched_getaffinity(0)),
        quota_cores=quota_cores(read_text(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup")),
        threads_per_core=count_cpus(read_text(cpu / "topology/thread_siblings_list")) or 1,
        governor=read_text(cpu / "cpufreq/scaling_governor"),
        scaling_driver=read_text(cpu / "cpufreq/scaling_driver"),
        limits=collect_limits(),
        load=collect_load(),
    )


def collect_versions() -> dict[str, str]:
    """Versions by name; torch is not imported, which takes seconds and may fail."""
    versions = {"python": platform.python_version()}
    packages = (
        ("paceline", "paceline"),
        ("torch", "torch"),
        ("NCCL", "nvidia-nccl-cu13"),
        ("NCCL", "nvidia-nccl-cu12"),
    )
    for name, package in packages:
        try:
            versions.setdefault(name, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        found = re.search(
            r"^cuda\b[^=]*= *'([\d.]+)'", read_text(Path(spec.origin).with_name("version.py")), re.MULTILINE
        )
        if found:
            versions["CUDA"] = found.group(1)
    return versions


def collect_limits() -> dict[str, ProcessLimit]:
    kinds = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    limits = {}
    for name, kind in kinds.items():
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
        limits[name] = ProcessLimit(soft, hard)
    return limits


def quota_cores(own_cgroup: str, root: Path) -> float | None:
    """The processor time this process may use, in cores: the least that its control groups allow.

    Args:
        own_cgroup: the text of /proc/self/cgroup.
        root: where control groups are mounted, of version 2 or 1.
    """
    quotas = []
    for line in own_cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        base = root if is_v2 else root / "cpu"
        folder = base / path.lstrip("/")
        # Inside a container the path may be the node's: then the mount's own root is what counts.
        for level in (folder, *folder.parents):
            if not level.is_relative_to(base):
                break
            if is_v2:
                quota, _, period = read_text(level / "cpu.max").partition(" ")
            else:
                quota, period = read_text(level / "cpu.cfs_quota_us"), read_text(level / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1 mean no limit
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def count_cpus(text: str) -> int:
    """The number of processors in a list such as "0,64" or "0-1"; 0 for any other text."""
    try:
        return len(parse_cpus(text))
    except ValueError:
        return 0
