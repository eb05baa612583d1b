"""All checks of one node, and what it tells a doctor on another node."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline import __version__, env
from paceline.errors import reason_of
from paceline.hardware.doctor import checks, gpus
from paceline.hardware.doctor.checks import Finding, NameLookup, TorchFacts
from paceline.hardware.nvml import open_nvml
from paceline.words import listing

CONNECT_LIMIT_S, REACH_LIMIT_S = 3.0, 20.0
"""For one attempt to connect, and for all: another node listens as soon as ssh has let in who asks."""
TORCH_LIMIT_S = 120.0
"""Initialising CUDA loads gigabytes of libraries."""
SHM = Path("/dev/shm")
_ABOUT_TORCH = """
import json, torch
num_gpus, problem = 0, ""
if torch.version.cuda:
    try:
        torch.cuda.init()
        num_gpus = torch.cuda.device_count()
    except RuntimeError as reason:
        problem = str(reason).splitlines()[0].rstrip(".")
print(json.dumps([torch.__version__, torch.version.cuda or "", num_gpus, problem]))
"""


@dataclass(frozen=True)
class NodeFacts:
    """What one node found out about itself, and what is compared between nodes."""

    findings: tuple[Finding, ...]
    versions: dict[str, str]
    gpus: str
    """Its GPUs in words."""
    mtus: dict[str, int]
    """The largest packets of the interfaces that lead to the other nodes."""


def examine(folder: Path, peers: Sequence[str] = (), library: Any = None) -> NodeFacts:
    """Check this node.

    Args:
        folder: where runs are written; absolute.
        peers: names or addresses of the other nodes of a run.
        library: what answers in place of the module pynvml.
    """
    torch, python = ask_torch(), platform.python_version()
    names, found = check_gpus(torch, library)
    lookups = [look_up(peer) for peer in peers]
    ways = [interface_towards(lookup.address) if lookup.address else "" for lookup in lookups]
    # Where others reach this node: by an interface that leads to them, if there is one.
    address = next((own for _, own in sorted(env.addresses(), key=lambda one: one[0] not in ways)), "")
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    obstacle = next(level for level in (folder, *folder.parents) if os.path.lexists(level))
    there = next(level for level in (folder, *folder.parents) if level.is_dir())
    found += [
        *checks.check_torch(torch, python),
        *checks.check_quota(len(os.sched_getaffinity(0)), quota_cores(read_text(Path("/proc/self/cgroup")))),
        *checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        *checks.check_shared_memory(shm.total if shm else 0, shm.free if shm else 0),
        *checks.check_run_folder(
            folder,
            shutil.disk_usage(there).free,
            "" if obstacle.is_dir() else str(obstacle),
            is_writable=os.access(there, os.W_OK | os.X_OK),
        ),
        *checks.check_own_name(look_up(socket.gethostname()), address, has_peers=bool(peers)),
    ]
    for lookup, way in zip(lookups, ways, strict=True):
        found += checks.check_route(lookup, way)
    mtus = {way: psutil.net_if_stats()[way].mtu for way in ways if way not in ("", "lo")}
    versions = {"paceline": __version__, "python": python, "torch": torch.version, "CUDA": torch.cuda}
    models = listing([f"{count} x {name}" for name, count in Counter(names).items()]) or "no GPU"
    return NodeFacts(tuple(found), versions, models, mtus)


def check_gpus(torch: TorchFacts, library: Any = None) -> tuple[list[str], list[Finding]]:
    """The names of the GPUs, and what is wrong with them."""
    found: list[Finding] = []
    with open_nvml(library) as nvml:
        driver, handles = nvml.text("nvmlSystemGetDriverVersion"), nvml.handles()
        names = [nvml.text("nvmlDeviceGetName", handle) for handle in handles.values()]
        for check in (gpus.check_peer_access, gpus.check_memory, gpus.check_speed, gpus.check_modes):
            found += check(nvml, handles) if handles else []
    if names and torch.version and env.visible_gpus() != []:
        found = checks.check_cuda(torch, len(names)) + found
    return names, checks.check_driver(len(names), max(num_gpus_on_bus(), len(names)), driver, nvml.problem) + found


def answer(folder: str, marker: str, peers: Sequence[str], port: int) -> dict[str, Any]:
    """What this node tells a doctor on another one, as one of several nodes that are asked at once: its facts, why it
    cannot connect to `peers`, what it reads in a file that all should see, and the time. All listen at `port`."""
    addresses_of = {peer: lookup.address for peer in peers if (lookup := look_up(peer)).address}
    unreachable, until = dict.fromkeys(addresses_of, ""), time.monotonic() + REACH_LIMIT_S
    with socket.create_server(("", port), backlog=1024, reuse_port=True):  # the kernel accepts connections
        while unreachable and time.monotonic() < until:
            for peer in list(unreachable):
                try:
                    socket.create_connection((addresses_of[peer], port), CONNECT_LIMIT_S).close()
                    del unreachable[peer]
                except OSError as problem:
                    unreachable[peer] = reason_of(problem)
            time.sleep(0.1)
        facts = examine(Path(folder), peers)  # takes seconds, in which the others still reach this node
    told = {"unreachable": unreachable, "marker": read_text(Path(marker)), "time_s": time.time()}
    return {"facts": asdict(facts), **told}


def ask_torch() -> TorchFacts:
    """Load torch in a process of its own, which libraries that do not fit may take down."""
    command = [sys.executable, "-c", _ABOUT_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"it was not loaded within {TORCH_LIMIT_S:g} s")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return TorchFacts(problem=said[-1].rstrip("."))
    return TorchFacts(*json.loads(done.stdout.splitlines()[-1]))


def num_gpus_on_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's (0x10de) display controllers (class 03) among the PCI devices."""
    texts = [(read_text(device / "vendor"), read_text(device / "class")) for device in devices.glob("*")]
    return sum(vendor == "0x10de" and kind.startswith("0x03") for vendor, kind in texts)


def quota_cores(own_cgroup: str, root: Path = Path("/sys/fs/cgroup")) -> float:
    """The processor time this process may use, in cores: the least that its control groups (version 2) allow.
    `own_cgroup`: the text of /proc/self/cgroup."""
    path = next((line[3:] for line in own_cgroup.splitlines() if line.startswith("0::")), "/")
    folder = root / path.lstrip("/")
    limits = [float("inf")]
    # Inside a container the path may be the node's: then the mount's own root is what counts.
    for level in (folder, *folder.parents):
        quota, _, period = read_text(level / "cpu.max").partition(" ")
        if level.is_relative_to(root) and quota.isdigit() and period.isdigit():  # "max" means no limit
            limits.append(int(quota) / int(period))
    return min(limits)


def look_up(name: str) -> NameLookup:
    began = time.perf_counter()
    try:
        sockaddr = socket.getaddrinfo(name.rpartition("@")[2], None, type=socket.SOCK_STREAM)[0][4]
        socket.getnameinfo(sockaddr, 0)
    except OSError as problem:
        return NameLookup(name, seconds=time.perf_counter() - began, problem=str(problem))
    return NameLookup(name, str(sockaddr[0]), time.perf_counter() - began)


def interface_towards(address: str) -> str:
    """The interface through which this node would send to an address; nothing is sent.

    Returns:
        Its name; "lo" for an address of this node itself, empty where there is no way.
    """
    try:
        source = env.address_towards(address)
    except OSError:
        return ""
    return "lo" if source == address else next((name for name, own in env.addresses() if own == source), "")


def read_text(path: Path) -> str:
    """A file's text without the spaces around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(answer(**json.loads(sys.argv[1]))))
