"""The program that times messages between nodes, one worker on each: `python -m paceline.measure.network_probe`.

It reads a `NetworkRequest`; the first worker leaves a `NetworkProbe`. Messages travel as in training, through the
process group.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import env
from paceline.measure.program import Report, run_program, unreported
from paceline.measure.stopwatch import median_s, seconds_of
from paceline.measure.timing import largest
from paceline.measure.values import NETWORK_FILE, NetworkProbe, NetworkRequest
from paceline.measure.workers import join_workers
from paceline.object_collectives import all_gather_objects
from paceline.spec import NetworkLink
from paceline.train.process_group import World

_NUM_PINGS, _NUM_WARMUP_PINGS = 200, 20
_SMALLEST_TRANSFER_BYTES, _MESSAGE_BYTES = 1 << 20, 16 << 20
_TRANSFER_S = 0.3
"""Long enough that how a transfer begins and ends does not matter."""
_NUM_TRANSFERS = 3


def probe_network(request: NetworkRequest, report: Report = unreported) -> NetworkProbe | None:
    """Time the links between nodes, pair after pair so that none disturbs another; a collective of all workers.

    Workers outside of a pair take part in its synchronisation, so that none waits long enough to count as hung.

    Returns:
        None on all workers but the first.
    """
    world = join_workers(request.device_kind, request.timeout_s)
    assert world.group is not None
    # A group has one connection between two workers, so as many groups are as many streams.
    timeout = timedelta(seconds=request.timeout_s)
    groups = [world.group, *(dist.new_group(timeout=timeout) for _ in range(request.num_streams - 1))]
    interfaces: list[str] = all_gather_objects(env.own_interface() or "", world.group)
    links = []
    for number, pair in enumerate(request.pairs):
        one, other = (request.hostnames[rank] for rank in pair)
        report(f"{one} and {other}", number / len(request.pairs))
        latency_s = _time_ping(pair, world)
        single = _time_both_ways(pair, world, groups[:1])
        report(f"{one} and {other}, {len(groups)} streams", (number + 0.5) / len(request.pairs))
        several = _time_both_ways(pair, world, groups)
        links.append(NetworkLink((one, other), max(single, several), latency_s, interfaces[pair[0]], single))
    return NetworkProbe(tuple(links)) if world.rank == 0 else None


def _time_ping(pair: tuple[int, int], world: World) -> float:
    """Half of the median time of 4 bytes there and back."""
    message = torch.zeros(1, device=world.device)

    def ping() -> None:
        _send(message, *pair, world)
        _send(message, *pair[::-1], world)

    seconds = 0.0
    if world.rank in pair:
        seconds = median_s(ping, _NUM_PINGS, world.device, num_warmup=_NUM_WARMUP_PINGS)
    return _told_by(pair[0], seconds / 2, world)


def _time_both_ways(pair: tuple[int, int], world: World, groups: Sequence[dist.ProcessGroup]) -> float:
    """A link is as good as its worse direction."""
    return min(_time_stream(*way, world, groups) for way in (pair, pair[::-1]))


def _time_stream(sender: int, receiver: int, world: World, groups: Sequence[dist.ProcessGroup]) -> float:
    """Median bytes a second from one rank to the other, by all groups at once.

    The sender's clock counts, until the receiver has said that all has come. Transfers double until one takes long
    enough; what they carry is sent and received over and over, since it does not matter.
    """
    num_bytes = _SMALLEST_TRANSFER_BYTES
    while (seconds := _time_transfer(num_bytes, sender, receiver, world, groups)) < _TRANSFER_S:
        num_bytes *= 2
    more = (_time_transfer(num_bytes, sender, receiver, world, groups) for _ in range(_NUM_TRANSFERS - 1))
    return num_bytes * len(groups) / statistics.median([seconds, *more])


def _time_transfer(
    num_bytes: int, sender: int, receiver: int, world: World, groups: Sequence[dist.ProcessGroup]
) -> float:
    """Seconds, for all workers, until `num_bytes` have gone through each of the groups and were acknowledged."""
    message = torch.zeros(min(num_bytes, _MESSAGE_BYTES), dtype=torch.uint8, device=world.device)
    answer = torch.zeros(1, device=world.device)
    move, peer = (dist.isend, receiver) if world.rank == sender else (dist.irecv, sender)

    def transfer() -> None:
        # By its tag, each stream uses another network interface where Gloo was given several.
        works = [
            move(message, peer, group=group, tag=tag)
            for _ in range(num_bytes // len(message))
            for tag, group in enumerate(groups)
        ]
        for work in works:
            assert work is not None
            work.wait()
        _send(answer, receiver, sender, world)

    seconds = seconds_of(transfer, world.device) if world.rank in (sender, receiver) else 0.0
    return _told_by(sender, seconds, world)


def _told_by(rank: int, seconds: float, world: World) -> float:
    """What `rank` has measured, for all workers."""
    return largest(seconds if world.rank == rank else 0.0, world.group)


def _send(message: Tensor, sender: int, receiver: int, world: World) -> None:
    """Send or receive, as this worker, one of the two, has to."""
    if world.rank == sender:
        dist.send(message, receiver)
    else:
        dist.recv(message, sender)


if __name__ == "__main__":
    run_program(__doc__, NetworkRequest, probe_network, NETWORK_FILE)
