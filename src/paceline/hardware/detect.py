"""This node's devices, found without loading torch."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path

from paceline import env
from paceline.spec import Cluster, Device, Node


def detect() -> Cluster:
    """A cluster of this node alone: its GPUs if it has any, else one CPU device a core it may use."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu_name = _cpu_name()
    gpus = [] if env.device_kind() == "cpu" else _gpus()
    devices = gpus or [Device("cpu", i, cpu_name, memory_bytes // num_cores) for i in range(num_cores)]
    return Cluster((Node(socket.gethostname(), num_cores, memory_bytes, cpu_name, tuple(devices)),))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[Device]:
    """NVIDIA GPUs as the driver lists them, as far as CUDA_VISIBLE_DEVICES lets workers see them."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(parse_gpus(listing), env.visible_gpus())


def parse_gpus(listing: str) -> list[tuple[Device, str]]:
    """Devices and their UUIDs from the lines "index, name, memory in MiB, uuid"."""
    gpus = []
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[0].isdigit() and parts[2].isdigit():
            gpus.append((Device("cuda", int(parts[0]), parts[1], int(parts[2]) * 2**20), parts[3]))
    return gpus


def visible(gpus: list[tuple[Device, str]], allowed: list[str] | None) -> list[Device]:
    """The GPUs among `allowed` (indices or UUID prefixes); all of them for None.

    As CUDA reads its variable: in this order, and no further than the first entry that names none.
    """
    if allowed is None:
        return [device for device, _ in gpus]
    found: list[Device] = []
    for wanted in allowed:
        named = [
            device
            for device, uuid in gpus
            if wanted == str(device.index) or (wanted.startswith("GPU-") and uuid.startswith(wanted))
        ]
        if not named:
            break
        found += named
    return found
