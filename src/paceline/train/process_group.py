"""Joining the other workers of a run, and leaving them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import env
from paceline.errors import LaunchError
from paceline.spec import Plan
from paceline.train.allocator import keep_freed_memory


@dataclass(frozen=True)
class World:
    """This worker among the others: its facts, its device, and the group of all (None in a world of one)."""

    facts: env.WorkerFacts
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return self.facts.rank

    @property
    def world_size(self) -> int:
        return self.facts.world_size


def join(facts: env.WorkerFacts, plan: Plan) -> World:
    """Pick this worker's device and meet the others.

    Raises:
        LaunchError: more workers than GPUs on this node, or a process group that somebody else set up differently.
    """
    torch.set_num_threads(plan.threads_per_worker)
    device = _device(facts, plan)
    if device.type == "cpu":
        keep_freed_memory()
    if dist.is_initialized():  # the user's script, or a notebook, was first
        if dist.get_world_size() != facts.world_size:
            raise LaunchError(
                f"A process group of {dist.get_world_size()} workers is already there, but the environment says "
                f"{facts.world_size}; call paceline.init before init_process_group, or start both alike."
            )
        return World(facts, device, dist.group.WORLD if facts.world_size > 1 else None)
    if facts.world_size == 1:
        return World(facts, device, None)
    dist.init_process_group(
        plan.backend,
        init_method=facts.init_method,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timedelta(seconds=plan.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return World(facts, device, dist.group.WORLD)


def leave(world: World) -> None:
    """Take the process group down, if it is still there."""
    if world.group is not None and dist.is_initialized():
        dist.destroy_process_group()


def _device(facts: env.WorkerFacts, plan: Plan) -> torch.device:
    if plan.device_kind == "cpu":
        return torch.device("cpu")
    if facts.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"Worker {facts.rank} wants GPU {facts.local_rank} of this node, but it has {torch.cuda.device_count()}; "
            "start as many workers as there are GPUs."
        )
    device = torch.device("cuda", facts.local_rank)
    torch.cuda.set_device(device)
    return device
