"""The queues of point-to-point messages between the workers of a pipeline, where the backend has any.

NCCL executes what one communicator is given in order, and a send waits there until its receiver has come to the
matching receive. On a communicator shared by several pairs of workers the order of a schedule makes workers wait for
each other in a circle. So each pair that sends has a communicator of its own for each direction: on it only messages
from one worker to one other wait for each other, and those are sent and received in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from paceline.process_groups import device_of, open_group

Queue = tuple[int, int]
"""Sender and receiver, by their ranks in the pipeline."""


def queue_rounds(num_workers: int, stages_per_worker: int) -> list[list[Queue]]:
    """All queues of a pipeline in rounds, in each of which no worker has more than one.

    Stages go round the workers, so values go from each to the next, with several stages a worker from the last to the
    first too, and gradients go back.
    """
    last = num_workers if stages_per_worker > 1 and num_workers > 2 else num_workers - 1
    rounds: list[list[Queue]] = []
    for first in (0, 1):
        pairs = [(worker, (worker + 1) % num_workers) for worker in range(first, last, 2)]
        closes_odd_ring = first == 0 and num_workers % 2 == 1 and last == num_workers
        for some in (pairs[:-1], pairs[-1:]) if closes_odd_ring else (pairs,):
            rounds.append(some)
            rounds.append([(after, before) for before, after in some])
    return [some for some in rounds if some]


def open_queues(
    group: dist.ProcessGroup, stages_per_worker: int, timeout_s: float
) -> Mapping[Queue, dist.ProcessGroup]:
    """The process groups of this worker's queues; a collective of all workers of the run, each with its pipeline.

    With a backend that matches messages by sender and receiver, as Gloo does, none is needed, and none is opened.
    """
    if dist.get_backend(group) != "nccl":
        return {}
    # A communicator that is opened by its first use has to be used by all of its workers then, and messages are not.
    dist.all_reduce(torch.zeros(1, device=device_of(group)), group=group)
    ranks, mine = dist.get_process_group_ranks(group), dist.get_rank(group)
    opened: dict[Queue, dist.ProcessGroup] = {}
    for some in queue_rounds(len(ranks), stages_per_worker):
        queue = next((queue for queue in some if mine in queue), (mine,))
        made = open_group([ranks[worker] for worker in queue], timeout_s)
        if made is not None and len(queue) == 2:
            opened[queue] = made
    return opened
