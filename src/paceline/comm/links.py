"""What an algorithm may use: the ranks, which of them share a node, how to send messages between them, and how numbers
travel in these.

Sums are always formed in the dtype of the values (float32 or more), never in that of messages.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.object_collectives import all_gather_objects

WIRE_DTYPES: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype of messages in each wire format; None: that of the values. bfloat16 keeps float32's range, float16 has
finer steps and overflows at 65,504."""


@dataclass(frozen=True)
class Links:
    """One worker's connections to the others.

    Only one thread may use them at a time, and all workers have to use them in the same order: the backend pairs
    messages by their order.
    """

    group: dist.ProcessGroup
    nodes: tuple[tuple[int, ...], ...]
    """The ranks on each node. Read one after the other they are the ring: it enters and leaves each node once."""
    device: torch.device
    node_group: dist.ProcessGroup | None = None
    """The workers of this node, where they are several."""
    wire: torch.dtype | None = None
    """The dtype of messages between workers, None: that of the values, which arrive unchanged; inside a node they do so
    anyway where the algorithm knows of nodes."""
    num_servers: int = 1
    """Workers that also serve, in the algorithms with parameter servers."""

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """All ranks, node after node."""
        return tuple(rank for node in self.nodes for rank in node)

    @cached_property
    def node(self) -> tuple[int, ...]:
        """The ranks on this worker's node."""
        return next(node for node in self.nodes if self.rank in node)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each node."""
        return tuple(node[0] for node in self.nodes)

    def all_reduce(self, values: Tensor) -> None:
        """The backend's own sum of `values` over all workers."""
        dist.all_reduce(values, group=self.group)

    def reduce_in_node(self, values: Tensor) -> None:
        """Leave the sum of 1-D `values` over this node's workers with its leader; the others' values are undefined."""
        if self.node_group is not None:
            dist.reduce(values, group_dst=0, group=self.node_group)

    def broadcast_in_node(self, values: Tensor) -> None:
        """The leader's values for all workers of this node."""
        if self.node_group is not None:
            dist.broadcast(values, group_src=0, group=self.node_group)

    def encode(self, values: Tensor) -> Tensor:
        """The message with these values; it may be `values` itself."""
        return values if self.wire is None else values.to(self.wire)

    def message_for(self, values: Tensor) -> Tensor:
        """An empty message for as many values as `values` has, to receive into."""
        return torch.empty_like(values, dtype=self.wire)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Transfer:
        """Begin to send messages, 1-D and contiguous, and to receive others, by the rank they go to or come from.

        Messages between two workers arrive in the order in which they were sent; empty ones are not sent at all.
        """
        operations = [
            dist.P2POp(operation, message.view(-1), group=self.group, group_peer=rank)
            for operation, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
            for rank, message in messages.items()
            if message.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, (*outgoing.values(), *incoming.values()))


class Transfer:
    """Messages in flight; keeps their memory alive until they have arrived."""

    def __init__(self, works: Sequence[dist.Work], messages: Sequence[Tensor]) -> None:
        self._works = works
        self._messages = messages

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._messages = (), ()


def open_links(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> Links:
    """Find out which workers share a node, and open a group of those on this one. A collective of all workers of the
    run, each with the group that it adds up with."""
    nodes, rank = node_of_every_rank(group), dist.get_rank(group)
    # Of one node that is `group` itself; other groups of the mesh may have several, and all workers open them together.
    near = next(node for node in nodes if rank in node) if len(nodes) > 1 else (rank,)
    in_run = dist.get_process_group_ranks(group)
    opened = open_group([in_run[member] for member in near], timeout_s)
    return Links(group, nodes, device, opened if len(nodes) > 1 else group)


def open_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup | None:
    """Open a group of some workers; a collective of all workers of the run, each with the group that it will be in.

    Groups must not overlap. Torch's `new_group(use_local_synchronization=True)` asks less of workers outside, but NCCL,
    which splits the communicator of all workers, then waits for these for ever.

    Args:
        ranks: the ranks in the run of the workers of this worker's group; this worker alone: it needs none.

    Returns:
        The group, in which workers have the order of their ranks; None for a worker alone.
    """
    world = dist.group.WORLD
    assert world is not None
    groups = sorted({tuple(sorted(one)) for one in all_gather_objects(list(ranks), world)})
    if sum(map(len, groups)) != dist.get_world_size():
        raise ValueError(f"workers want groups that overlap: {groups}")
    if all(len(members) == 1 for members in groups):
        return None
    opened = _open_groups(world, tuple(groups), timedelta(seconds=timeout_s))
    return opened if len(ranks) > 1 else None


@functools.cache  # the next run in the process uses them again
def _open_groups(
    world: dist.ProcessGroup, groups: tuple[tuple[int, ...], ...], timeout: timedelta
) -> dist.ProcessGroup | None:
    """The group of this worker, if it is in one of several."""
    if world.bound_device_id is not None:
        # One call for all groups. Workers alone get one, too: torch names groups by how many a worker has.
        return dist.split_group(split_ranks=[list(members) for members in groups], timeout=timeout)
    # Everybody takes part in the making of every group, in one order.
    made = [dist.new_group(list(members), timeout=timeout) for members in groups if len(members) > 1]
    return next((one for one in made if isinstance(one, dist.ProcessGroup)), None)


def node_of_every_rank(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """The ranks of every node, nodes in the order of their first rank; a collective of all workers of `group`."""
    ranks: dict[str, list[int]] = {}
    boot = Path("/proc/sys/kernel/random/boot_id")  # of one node are workers of the same host name and boot
    name = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    for rank, name_there in enumerate(all_gather_objects(name, group)):
        ranks.setdefault(name_there, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())
