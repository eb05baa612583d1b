"""The ways between nodes, timed: what two workers send each other as training would, through its process group.

    python -m paceline.measure.network_probe FOLDER

One worker on every node. FOLDER holds network_request.json (a `NetworkRequest`); network.json (a `NetworkProbe`) is
left there. Started by `paceline probe`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import env
from paceline.spec import DeviceKind, NetworkLink, Plan
from paceline.spec.codec import at_least, from_mapping, to_mapping
from paceline.train.process_group import World, join
from paceline.train.progress import Report, bar
from paceline.train.timing import settle

NETWORK_REQUEST_FILE, NETWORK_RESULT_FILE = "network_request.json", "network.json"

_NUM_PINGS, _NUM_WARMUP_PINGS = 200, 20
_SMALLEST_TRANSFER_BYTES, _MESSAGE_BYTES = 1 << 20, 16 << 20
_TRANSFER_S = 0.3
"""Long enough that how a transfer begins and ends does not matter."""
_NUM_TRANSFERS = 3


@dataclass(frozen=True)
class NetworkRequest:
    """Between which nodes to time what they send each other; rank r is on node r."""

    hostnames: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    device_kind: DeviceKind = "cpu"
    num_streams: int = at_least(2, 4)
    """Connections in parallel, to compare with one alone."""


@dataclass(frozen=True)
class NetworkProbe:
    """What was measured between nodes."""

    links: tuple[NetworkLink, ...]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(to_mapping(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> NetworkProbe:
        return from_mapping(cls, json.loads(path.read_text(encoding="utf-8")))


def probe_network(request: NetworkRequest, report: Report = lambda _doing, _done: None) -> NetworkProbe:
    """Time the ways between nodes, pair after pair so that none disturbs another; a common act of all workers.

    Those that are not of a pair follow what it does, so that nobody waits long enough to be taken for hung.
    """
    facts = env.worker_facts()
    plan = Plan(world_size=facts.world_size, device_kind=request.device_kind)
    torch.set_num_threads(1)
    world = join(facts, plan)
    assert world.group is not None
    # A group has one connection between two workers, so as many groups are as many streams.
    timeout = timedelta(seconds=plan.timeout_s)
    more = [dist.new_group(timeout=timeout) for _ in range(request.num_streams - 1)]
    streams = (world.group, *more)
    interfaces = [""] * world.world_size
    dist.all_gather_object(interfaces, env.own_interface() or "")
    links = []
    for number, pair in enumerate(request.pairs):
        one, other = (request.hostnames[rank] for rank in pair)
        report(f"{one} and {other}", number / len(request.pairs))
        latency_s = _time_ping(pair, world)
        single = _time_both_ways(pair, world, streams[:1])
        report(f"{one} and {other}, {len(streams)} streams", (number + 0.5) / len(request.pairs))
        several = _time_both_ways(pair, world, streams)
        links.append(NetworkLink((one, other), max(single, several), latency_s, interfaces[pair[0]], single))
    return NetworkProbe(tuple(links))


def _time_both_ways(pair: tuple[int, int], world: World, groups: Sequence[dist.ProcessGroup]) -> float:
    """A link is as good as its worse direction."""
    return min(_time_stream(way, world, groups) for way in (pair, pair[::-1]))


def _time_ping(pair: tuple[int, int], world: World) -> float:
    """Half of the median time of 4 bytes there and back."""
    message = torch.zeros(1, device=world.device)
    times = [0.0]
    if world.rank in pair:
        for _ in range(_NUM_WARMUP_PINGS + _NUM_PINGS):
            began = time.perf_counter()
            for sender, receiver in (pair, pair[::-1]):
                _send(message, sender, receiver, world)
            settle(world.device)
            times.append(time.perf_counter() - began)
    return _told_by(pair[0], statistics.median(times[_NUM_WARMUP_PINGS:] or times) / 2, world)


def _time_stream(way: tuple[int, int], world: World, groups: Sequence[dist.ProcessGroup]) -> float:
    """Bytes a second from the first rank of `way` to the second, by all groups at once.

    The sender's clock counts, until the receiver has said that all has come. Transfers double until one takes long
    enough; what they carry is sent and received over and over, since it does not matter.
    """
    sender, receiver = way
    peer = receiver if world.rank == sender else sender
    move = dist.isend if world.rank == sender else dist.irecv
    answer = torch.zeros(1, device=world.device)
    rates: list[float] = []
    num_bytes, is_long_enough = _SMALLEST_TRANSFER_BYTES, False
    while len(rates) < _NUM_TRANSFERS:
        seconds = 0.0
        if world.rank in way:
            message = torch.zeros(min(num_bytes, _MESSAGE_BYTES), dtype=torch.uint8, device=world.device)
            settle(world.device)
            began = time.perf_counter()
            works = [move(message, peer, group=group) for _ in range(num_bytes // len(message)) for group in groups]
            for work in works:
                assert work is not None
                work.wait()
            _send(answer, receiver, sender, world)
            settle(world.device)
            seconds = time.perf_counter() - began
        seconds = _told_by(sender, seconds, world)
        is_long_enough = is_long_enough or seconds >= _TRANSFER_S
        if is_long_enough:
            rates.append(num_bytes * len(groups) / seconds)
        else:
            num_bytes *= 2
    return statistics.median(rates)


def _told_by(rank: int, number: float, world: World) -> float:
    """What `rank` says, for all workers."""
    value = torch.tensor([number], dtype=torch.float64, device=world.device)
    dist.broadcast(value, rank)
    return float(value)


def _send(message: Tensor, sender: int, receiver: int, world: World) -> None:
    """The part that this worker, one of the two, has in it."""
    if world.rank == sender:
        dist.send(message, receiver)
    else:
        dist.recv(message, sender)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.measure.network_probe", description=__doc__)
    parser.add_argument("folder", type=Path, help="with network_request.json; network.json is left there")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    mapping = json.loads((folder / NETWORK_REQUEST_FILE).read_text(encoding="utf-8"))
    is_first = env.worker_facts().rank == 0
    with bar("meeting of all nodes", is_shown=is_first and not arguments.quiet) as report:
        result = probe_network(from_mapping(NetworkRequest, mapping), report)
    if is_first:
        result.save(folder / NETWORK_RESULT_FILE)


if __name__ == "__main__":
    main()
