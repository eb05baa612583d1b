"""Times what the fsdp axis exchanges on CPUs: a gather of a parameter from its shards, and a scatter of its gradient.

FSDP and Gloo copy what they exchange several times, into memory that the kernel gives page by page, because workers of
sharded models give back what they free. That takes longer than the messages do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm.links import node_of_every_rank, open_node_group
from paceline.measure.stopwatch import median_s
from paceline.measure.timing import largest
from paceline.spec import ShardingTiming
from paceline.train.process_group import World, give_back_freed_memory, keep_freed_memory

_NUM_ROUNDS = 3
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**26


def time_sharding(world: World, model: nn.Module, timeout_s: float) -> ShardingTiming | None:
    """Exchange a parameter as large as the largest of `model` on all nodes at once; a collective of all workers.

    Returns:
        Median seconds of the slowest worker; None on GPUs and where no node has two workers.
    """
    if world.device.type != "cpu" or world.group is None:
        return None
    nodes = node_of_every_rank(world.group)
    if max(map(len, nodes)) == 1:
        return None
    group = open_node_group(nodes, world.group, timeout_s)
    num_shards = 1 if group is None else group.size()
    num_bytes = min(max([_LEAST_BYTES, *(one.nbytes for one in model.parameters())]), _MOST_BYTES)
    shard = torch.ones(num_bytes // 4 // num_shards)
    gradient = torch.ones(len(shard) * num_shards)

    def gather() -> None:
        flat = torch.empty_like(gradient)
        own = flat.view(num_shards, -1)[dist.get_rank(group)].copy_(shard)
        dist.all_gather_into_tensor(flat, own, group=group)
        torch.empty_like(flat).copy_(flat)  # into the parameters

    def scatter() -> None:
        flat = gradient.clone()  # of the gradients of a block
        dist.reduce_scatter_tensor(torch.empty_like(shard), flat, group=group)

    def typical_s(exchange: Callable[[], None]) -> float:
        return largest(0.0 if group is None else median_s(exchange, _NUM_ROUNDS), world.group)

    give_back_freed_memory()
    try:
        return ShardingTiming(num_bytes, typical_s(gather), typical_s(scatter))
    finally:
        keep_freed_memory()
