"""What an algorithm may use: the ranks, which of them share a node, and how to send messages between them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import env
from paceline.comm.shared_memory import SharedMemory
from paceline.comm.shared_memory import is_possible as shared_memory_is_possible
from paceline.comm.wire import FLOAT32, WireFormat
from paceline.object_collectives import all_gather_objects
from paceline.process_groups import device_of, open_group

SMALLEST_CUT_BYTES = 64 * 1024
"""A smaller message uses one network interface: a second one would save less than it costs."""


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
    timeout_s: float
    shared_memory: SharedMemory | None = None
    """What the workers of this node share, if they compute on CPU and are more than one."""
    node_group: dist.ProcessGroup | None = None
    """The workers of this node as a group of their own, where they cannot share memory."""
    wire: WireFormat = FLOAT32
    """How values travel between workers; inside a node they stay as they are where the algorithm knows of nodes."""
    num_interfaces: int = 1
    """Network interfaces of each node that carry messages to other nodes at the same time."""
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

    def reduce_in_node(self, values: Tensor) -> None:
        """Leave the sum of 1-D `values` over this node's workers with its leader; the others' values are undefined."""
        if self.shared_memory is not None:
            self.shared_memory.reduce(values)
        elif self.node_group is not None:
            dist.reduce(values, group_dst=0, group=self.node_group)

    def broadcast_in_node(self, values: Tensor) -> None:
        """The leader's values for all workers of this node."""
        if self.shared_memory is not None:
            self.shared_memory.broadcast(values)
        elif self.node_group is not None:
            dist.broadcast(values, group_src=0, group=self.node_group)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Transfer:
        """Begin to send messages, 1-D and contiguous, and to receive others, by the rank they go to or come from.

        Messages between two workers arrive in the order in which they were sent; empty ones are not sent at all.
        """
        operations = [
            # Of several interfaces Gloo sends over the one whose number is the tag.
            dist.P2POp(operation, part, group=self.group, group_peer=rank, tag=tag)
            for operation, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
            for rank, message in messages.items()
            for tag, part in enumerate(self._parts(rank, message))
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, (*outgoing.values(), *incoming.values()))

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        """What goes between nodes, 1-D, in a part for each network interface that it uses."""
        if self.num_interfaces == 1 or values.nbytes < SMALLEST_CUT_BYTES:
            return (values,)
        return values.tensor_split(self.num_interfaces)

    def _parts(self, rank: int, message: Tensor) -> Sequence[Tensor]:
        """A message to or from `rank`, in the parts in which it is sent."""
        if not message.numel():
            return ()
        return (message,) if rank in self.node else self.parts(message.view(-1))


class Transfer:
    """Messages in flight; keeps their memory alive until they have arrived."""

    def __init__(self, works: Sequence[dist.Work], messages: Sequence[Tensor]) -> None:
        self._works = works
        self._messages = messages

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._messages = (), ()


@overload
def open_links(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> Links: ...


@overload
def open_links(group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> Links | None: ...


def open_links(group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> Links | None:
    """Find out which workers share a node, and open memory that they share.

    A collective of all workers of the run, each with the group that it adds up with; None: it does not.
    """
    # Asked of all workers of the run: those on different processors must not go different ways.
    share_memory = all(all_gather_objects(device.type == "cpu" and shared_memory_is_possible(), dist.group.WORLD))
    if group is None:
        if not share_memory:
            open_group([dist.get_rank()], timeout_s)
        return None
    nodes = node_of_every_rank(group)
    num_interfaces = _num_interfaces(group, nodes)
    if share_memory:
        memory = SharedMemory.open(group, nodes, timeout_s)
        return Links(group, nodes, device, timeout_s, memory, num_interfaces=num_interfaces)
    if len(nodes) == 1:
        # Other groups of the same mesh may have more nodes, and all workers open groups together.
        open_node_group([(rank,) for rank in nodes[0]], group, timeout_s)
        return Links(group, nodes, device, timeout_s, node_group=group)
    node_group = open_node_group(nodes, group, timeout_s)
    return Links(group, nodes, device, timeout_s, node_group=node_group, num_interfaces=num_interfaces)


def message_links(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> Links:
    """Links for messages alone: what workers of a node share is not opened. A collective of `group`."""
    nodes = node_of_every_rank(group)
    return Links(group, nodes, device, timeout_s, num_interfaces=_num_interfaces(group, nodes))


def _num_interfaces(group: dist.ProcessGroup, nodes: Sequence[Sequence[int]]) -> int:
    """The network interfaces over which a group's messages between nodes are sent by choice; NCCL chooses itself."""
    can_choose = len(nodes) > 1 and device_of(group).type == "cpu"
    return max(1, len(env.gloo_interfaces())) if can_choose else 1


def open_node_group(
    nodes: Sequence[tuple[int, ...]], group: dist.ProcessGroup, timeout_s: float
) -> dist.ProcessGroup | None:
    """A group of the workers of `group` on this node; None for a worker alone on it.

    A collective of all workers of the run, each with its own `group`.
    """
    rank = dist.get_rank(group)
    node = next(node for node in nodes if rank in node)
    global_ranks = dist.get_process_group_ranks(group)
    return open_group([global_ranks[member] for member in node], timeout_s)


def node_of_every_rank(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """The ranks of every node; a collective of all workers."""
    return group_by_node(all_gather_objects(node_identity(), group))


def group_by_node(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every node, from the name of each rank's node; nodes in the order of their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def node_identity() -> str:
    """Equal for two processes exactly if they can share memory: same host, same boot, same /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = Path("/dev/shm")
    return "/".join(
        [
            socket.gethostname(),
            boot.read_text().strip() if boot.exists() else "",
            f"{shared.stat().st_dev}" if shared.exists() else "",
        ]
    )
