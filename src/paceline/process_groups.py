"""Process groups beside the one of all workers, and the device from which a group's backend sends.

NCCL sends from GPUs only, and opens a group by splitting the communicator of all workers, in which every one of them
has to take part. Gloo sends from host memory. What differs between them is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor has to be for the backend of `group` to send it: host memory wherever the backend can."""
    kinds = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def open_host_group(timeout_s: float) -> dist.ProcessGroup:
    """Open a further group of all workers, for tensors in host memory; a collective of them."""
    opened: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return opened


def open_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup | None:
    """Open a group of some workers; a collective of all workers of the run, each with the group that it will be in.

    Groups must not overlap. Torch's `new_group(use_local_synchronization=True)` asks less of workers outside, but a
    backend that splits the communicator of all workers then waits for these for ever.

    Args:
        ranks: the ranks in the run of the workers of this worker's group; this worker alone: it needs none.

    Returns:
        The group, in which workers have the order of their ranks; None for a worker alone.
    """
    world = dist.group.WORLD
    assert world is not None
    mine = torch.tensor([min(ranks)], device=device_of(world))
    first_of = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(first_of, mine)
    groups: dict[int, list[int]] = {}
    for rank, first in enumerate(torch.cat(first_of).tolist()):
        groups.setdefault(first, []).append(rank)
    own = groups[min(ranks)]
    if own != sorted(ranks):
        raise ValueError(f"rank {dist.get_rank()} wants a group of {sorted(ranks)}, and others one of {own}")
    timeout = timedelta(seconds=timeout_s)
    if all(len(members) == 1 for members in groups.values()):
        return None
    if world.bound_device_id is not None:
        # One call for all groups. Workers alone get one, too: torch names groups by how many a worker has.
        opened = dist.split_group(split_ranks=list(groups.values()), timeout=timeout)
    else:
        # Everybody takes part in the making of every group, in one order.
        made = [dist.new_group(members, timeout=timeout) for members in groups.values() if len(members) > 1]
        opened = next((one for one in made if isinstance(one, dist.ProcessGroup)), None)
    return opened if len(own) > 1 else None
