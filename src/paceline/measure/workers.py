"""What measuring programs do with other workers: join them, look at the memory they share."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline import env
from paceline.spec import DeviceKind, Plan
from paceline.train.process_group import World, join


def join_workers(device_kind: DeviceKind | None, timeout_s: float) -> World:
    """Join the other workers, on GPUs where there are any unless `device_kind` or the environment says otherwise."""
    facts = env.worker_facts()
    kind = device_kind or env.device_kind() or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(env.thread_limit() or max(1, torch.get_num_threads() // facts.local_world_size))
    device: DeviceKind = "cuda" if kind == "cuda" else "cpu"
    return join(facts, Plan(world_size=facts.world_size, device_kind=device, timeout_s=timeout_s))


def free_bytes(device: torch.device) -> float:
    """Memory to be had on this GPU, or on this node for a CPU; infinite where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))
