"""Versions, processor and limits of a node."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from paceline.hardware.checks.finding import Finding, error, ok, warning
from paceline.hardware.cpu_list import parse_cpus

MIN_OPEN_FILES = 4096
"""Loader processes pass tensors as open files, and each worker has sockets to its peers; 1024, a usual default, runs
out in long epochs ("Too many open files")."""
MIN_PROCESSES = 4096
"""Threads count too, and a worker of many cores starts hundreds."""


@dataclass(frozen=True)
class Limit:
    """What `ulimit` shows; None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class SystemFacts:
    """What the operating system tells of a node."""

    versions: dict[str, str] = field(default_factory=dict)
    """Of paceline, python, torch; of CUDA and NCCL where torch brings them."""
    num_cores: int = 1
    """Those this process may run on."""
    quota_cores: float | None = None
    """Processor time a container may use, in cores; None: no limit."""
    threads_per_core: int = 1
    governor: str = ""
    scaling_driver: str = ""
    limits: dict[str, Limit] = field(default_factory=dict)
    """By their names in `ulimit`: nofile, nproc, memlock."""


def collect_system(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> SystemFacts:
    """Read what there is; what cannot be read keeps its default."""
    cpu = sys / "devices/system/cpu/cpu0"
    return SystemFacts(
        versions=collect_versions(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota_cores=quota_cores(read(proc / "self/cgroup"), sys / "fs/cgroup"),
        threads_per_core=count_cpus(read(cpu / "topology/thread_siblings_list")) or 1,
        governor=read(cpu / "cpufreq/scaling_governor"),
        scaling_driver=read(cpu / "cpufreq/scaling_driver"),
        limits=collect_limits(),
    )


def read(path: Path) -> str:
    """A file's text without the spaces around it; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def collect_versions() -> dict[str, str]:
    """Without importing torch, which takes seconds and would hide that it cannot be imported."""
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
        found = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", read(Path(spec.origin).with_name("version.py")), re.MULTILINE)
        if found:
            versions["CUDA"] = found.group(1)
    return versions


def collect_limits() -> dict[str, Limit]:
    kinds = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    limits = {}
    for name, kind in kinds.items():
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
        limits[name] = Limit(soft, hard)
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
        # Inside a container the path may be the host's: then the mount's own root is what counts.
        for level in (folder, *folder.parents):
            if not level.is_relative_to(base):
                break
            if is_v2:
                quota, _, period = read(level / "cpu.max").partition(" ")
            else:
                quota, period = read(level / "cpu.cfs_quota_us"), read(level / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1 mean no limit
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def count_cpus(text: str) -> int:
    """How many processors a list such as "0,64" or "0-1" names; 0 for what is none."""
    try:
        return len(parse_cpus(text))
    except ValueError:
        return 0


def check_system(facts: SystemFacts, *, has_gpus: bool, has_rdma: bool) -> list[Finding]:
    return [
        *check_torch(facts.versions),
        *check_quota(facts.num_cores, facts.quota_cores),
        *check_threads_per_core(facts.num_cores, facts.threads_per_core, has_gpus=has_gpus),
        *check_governor(facts.governor, facts.scaling_driver),
        *check_open_files(facts.limits.get("nofile")),
        *check_processes(facts.limits.get("nproc")),
        *check_locked_memory(facts.limits.get("memlock"), has_rdma=has_rdma),
    ]


def check_torch(versions: dict[str, str]) -> list[Finding]:
    if "torch" not in versions:
        return error("torch", "Torch is not installed for this Python.", "pip install torch")
    return ok("torch", f"torch {versions['torch']} on Python {versions.get('python', 'of unknown version')}.")


def check_quota(num_cores: int, quota: float | None) -> list[Finding]:
    """A container sees all cores of its node, and starts as many threads, whatever share of them it was given."""
    if quota is None or quota >= num_cores:
        return ok("cpu quota", f"All of {num_cores} cores may be used.")
    whole = max(1, int(quota))
    return warning(
        "cpu quota",
        f"The control group allows the time of {quota:.3g} cores, but {num_cores} are visible: threads beyond that "
        "are put to sleep in the middle of a step.",
        f"Give the container more cores, or use no more than {whole}: taskset -c 0-{whole - 1} paceline …",
    )


def check_threads_per_core(num_cores: int, threads_per_core: int, *, has_gpus: bool) -> list[Finding]:
    if threads_per_core > 1 and not has_gpus and num_cores > threads_per_core:
        real = num_cores // threads_per_core
        return warning(
            "hyper-threads",
            f"{threads_per_core} of the {num_cores} processors share a core each, so CPU workers beyond {real} gain "
            "little.",
            f"Train with at most {real} workers: paceline train -n {real} …",
        )
    return ok("hyper-threads", f"{threads_per_core} hardware thread{'s' * (threads_per_core > 1)} a core.")


def check_governor(governor: str, scaling_driver: str) -> list[Finding]:
    # The processor's own control (intel_pstate, amd-pstate-epp) calls "powersave" what goes up under load all the same.
    if governor in ("powersave", "conservative") and scaling_driver not in ("intel_pstate", "amd-pstate-epp"):
        return warning(
            "cpu governor",
            f"The frequency governor is {governor}: cores stay slow under load.",
            "sudo cpupower frequency-set -g performance",
        )
    return ok("cpu governor", f"The frequency governor is {governor or 'not to be seen, as in most virtual machines'}.")


def check_open_files(limit: Limit | None) -> list[Finding]:
    if limit is None or limit.soft is None or limit.soft >= MIN_OPEN_FILES:
        return ok("ulimit nofile", f"A process may open {_count(limit)} files.")
    return warning(
        "ulimit nofile",
        f"A process may open only {limit.soft} files; data loaders and sockets run out of them below {MIN_OPEN_FILES}.",
        _raise_limit("n", "nofile", limit, MIN_OPEN_FILES),
    )


def check_processes(limit: Limit | None) -> list[Finding]:
    if limit is None or limit.soft is None or limit.soft >= MIN_PROCESSES:
        return ok("ulimit nproc", f"A user may have {_count(limit)} processes and threads.")
    return warning(
        "ulimit nproc",
        f"A user may have only {limit.soft} processes and threads; workers start hundreds each.",
        _raise_limit("u", "nproc", limit, MIN_PROCESSES),
    )


def check_locked_memory(limit: Limit | None, *, has_rdma: bool) -> list[Finding]:
    """RDMA cards pin the memory they read; without them nothing large is locked."""
    if limit is None or limit.soft is None or not has_rdma:
        return ok("ulimit memlock", "Enough memory may be locked for what this node has.")
    return error(
        "ulimit memlock",
        f"Only {limit.soft // 1024} KiB may be locked, but this node has RDMA cards, which lock what they send: "
        'NCCL fails with "ibv_reg_mr".',
        "ulimit -l unlimited"
        if limit.hard is None
        else "As root put '* - memlock unlimited' into /etc/security/limits.conf and log in again; in a container: "
        "--ulimit memlock=-1.",
    )


def _count(limit: Limit | None) -> str:
    return "any number of" if limit is None or limit.soft is None else str(limit.soft)


def _raise_limit(flag: str, name: str, limit: Limit, enough: int) -> str:
    if limit.hard is None or limit.hard >= enough:
        return f"ulimit -{flag} {enough if limit.hard is None else limit.hard}"
    return (
        f"As root put '* - {name} 65536' into /etc/security/limits.conf and log in again; in a container: "
        f"--ulimit {name}=65536."
    )
