"""Timed links inside a node: `python -m paceline.measure.link_probe FOLDER`, one worker on every node.

Started by `paceline probe`. Rank 0 finds its node in FOLDER/node0.json and leaves FOLDER/links0.json: {"links": […],
"not_measured": ["…"]}; rank 1 has node1.json, and so on. On GPUs copies between two of them are timed, one pair for
every label; on CPU what two processes tell each other through shared memory and through loopback.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import mmap
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline import env
from paceline.spec import Link, Node
from paceline.spec.codec import from_mapping, to_mapping

NODE_FILE = "node{rank}.json"
LINKS_FILE = "links{rank}.json"

MOST_NODES_IN_FULL = 4
"""Up to so many nodes every pair is timed; beyond, their number would grow faster than patience."""

SHARED_MEMORY, LOOPBACK = "SHM", "TCP"
"""Labels of what CPU workers of one node talk through."""

LIMIT_S = 30.0
"""For one exchange; it takes milliseconds."""
_STREAM_BYTES = 64 * 2**20
_CHUNK_BYTES = 256 * 2**10
_DEPTH = 4
_NUM_STREAMS = 5
_NUM_PINGS = 500
_COPY_BYTES = 256 * 2**20
_NUM_COPIES = 10


@dataclass(frozen=True)
class LinkTimes:
    """One direction of a link."""

    bytes_per_s: float
    latency_s: float
    """Until the first byte has arrived."""


@dataclass(frozen=True)
class LinkProbe:
    """What was measured, and a sentence for everything that was not."""

    links: tuple[Link, ...] = ()
    not_measured: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(to_mapping(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LinkProbe:
        return from_mapping(cls, json.loads(path.read_text(encoding="utf-8")))


def with_measured(node: Node, measured: Sequence[Link]) -> Node:
    """`node` with measured links in place of its own of the same label, or beside them where it has none.

    Links of one label are of one kind, so one measurement speaks for all of them between devices.
    """
    by_label = {link.label: link for link in measured}
    devices = {device.label for device in node.devices}
    known = [
        dataclasses.replace(
            link,
            bytes_per_s=by_label[link.label].bytes_per_s,
            latency_s=by_label[link.label].latency_s,
            source="measured",
        )
        if link.label in by_label and devices.issuperset(link.ends)
        else link
        for link in node.links
    ]
    labels = {link.label for link in known if devices.issuperset(link.ends)}
    return dataclasses.replace(node, links=(*known, *(link for link in measured if link.label not in labels)))


def node_pairs(num_nodes: int) -> list[tuple[int, int]]:
    """Pairs of nodes to time, each once with the lower number first.

    All of them up to `MOST_NODES_IN_FULL` nodes; beyond, a ring of neighbours, and each node with the one that stands
    opposite in it, often in another rack (of an odd number of nodes one has none).
    """
    if num_nodes <= MOST_NODES_IN_FULL:
        return list(itertools.combinations(range(num_nodes), 2))
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    opposite = [(node, node + num_nodes // 2) for node in range(num_nodes // 2)]
    return [(min(pair), max(pair)) for pair in (*ring, *opposite)]


def measure_links(node: Node) -> LinkProbe:
    """Time the links between this node's devices, each label once."""
    if node.device_kind == "cuda":
        return _measure_gpus(node)
    if len(node.devices) < 2:
        return LinkProbe(not_measured=("links inside the node: it has one device",))
    ends = (node.devices[0].label, node.devices[1].label)
    links, reasons = [], []
    for label, what, measure in (
        (SHARED_MEMORY, "shared memory", time_shared_memory),
        (LOOPBACK, "loopback", time_loopback),
    ):
        try:
            times = measure()
        except (OSError, RuntimeError) as problem:
            reasons.append(f"{what}: {problem}")
        else:
            links.append(Link(ends, label, times.bytes_per_s, times.latency_s, "measured"))
    return LinkProbe(tuple(links), tuple(reasons))


# --- between CPU workers ---


def time_loopback() -> LinkTimes:
    """Two processes on a TCP connection: a byte there and back, then a stream one way."""
    with socket.create_server(("127.0.0.1", 0)) as door, _Partner(_send_on_loopback, door.getsockname()[1]):
        door.settimeout(LIMIT_S)
        connection, _ = door.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pings = []
            for _ in range(_NUM_PINGS):
                began = time.perf_counter()
                connection.sendall(b"?")
                _receive(connection, memoryview(bytearray(1)))
                pings.append(time.perf_counter() - began)
            streams = []
            arrived = memoryview(bytearray(_STREAM_BYTES))
            for _ in range(_NUM_STREAMS + 1):
                began = time.perf_counter()
                connection.sendall(b"!")
                _receive(connection, arrived)
                streams.append(time.perf_counter() - began)
    return _times(streams, pings)


def _send_on_loopback(port: int) -> None:
    stream = bytes(_STREAM_BYTES)
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := connection.recv(1):
            connection.sendall(b"." if asked == b"?" else stream)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        if count == 0:
            raise OSError("the other process ended")
        into = into[count:]


def time_shared_memory() -> LinkTimes:
    """Two processes on one mapping: a counter there and back, then a stream one way through a ring of chunks.

    Raises:
        RuntimeError: this processor may show stores to others in another order, so that the ring would not be safe.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(f"it needs stores in order, which {platform.machine()} does not promise")
    with (
        mmap.mmap(-1, mmap.PAGESIZE + _DEPTH * _CHUNK_BYTES) as shared,
        _Partner(_send_through_memory, shared),
        _Ring(shared) as ring,
    ):
        pings = []
        for number in range(1, _NUM_PINGS + 1):
            began = time.perf_counter()
            ring.mine.value = number
            ring.theirs.wait_for(number)
            pings.append(time.perf_counter() - began)
        arrived = memoryview(bytearray(_STREAM_BYTES))
        streams = []
        for number in range(_NUM_STREAMS + 1):
            began = time.perf_counter()
            ring.start.value = number + 1
            ring.receive(arrived, number * _NUM_CHUNKS)
            streams.append(time.perf_counter() - began)
    return _times(streams, pings)


_NUM_CHUNKS = _STREAM_BYTES // _CHUNK_BYTES


def _send_through_memory(shared: mmap.mmap) -> None:
    with _Ring(shared) as ring:
        for number in range(1, _NUM_PINGS + 1):
            ring.mine.wait_for(number)
            ring.theirs.value = number
        stream = memoryview(bytes(_STREAM_BYTES))
        for number in range(_NUM_STREAMS + 1):
            ring.start.wait_for(number + 1)
            ring.send(stream, number * _NUM_CHUNKS)


class _Counter:
    """Eight aligned bytes of shared memory in a cache line of their own; only grows, written by one process alone."""

    def __init__(self, numbers: memoryview, place: int) -> None:
        self._numbers = numbers
        self._place = place * 16

    @property
    def value(self) -> int:
        return int(self._numbers[self._place])

    @value.setter
    def value(self, number: int) -> None:
        self._numbers[self._place] = number

    def wait_for(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self._numbers[self._place] < number:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise RuntimeError("the other process fell silent")


class _Ring:
    """Chunks under way between two processes, and the counters that say whose they are."""

    def __init__(self, shared: mmap.mmap) -> None:
        self._whole = memoryview(shared)
        self._numbers = self._whole[: mmap.PAGESIZE].cast("q")
        self._slots = self._whole[mmap.PAGESIZE :]
        self.mine, self.theirs, self.start, self._filled, self._taken = (
            _Counter(self._numbers, place) for place in range(5)
        )

    def send(self, stream: memoryview, first: int) -> None:
        for number in range(_NUM_CHUNKS):
            self._taken.wait_for(first + number + 1 - _DEPTH)
            slot = (first + number) % _DEPTH * _CHUNK_BYTES
            at = number * _CHUNK_BYTES
            self._slots[slot : slot + _CHUNK_BYTES] = stream[at : at + _CHUNK_BYTES]
            self._filled.value = first + number + 1

    def receive(self, into: memoryview, first: int) -> None:
        for number in range(_NUM_CHUNKS):
            self._filled.wait_for(first + number + 1)
            slot = (first + number) % _DEPTH * _CHUNK_BYTES
            at = number * _CHUNK_BYTES
            into[at : at + _CHUNK_BYTES] = self._slots[slot : slot + _CHUNK_BYTES]
            self._taken.value = first + number + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The mapping cannot be unmapped while somebody looks at it.
        for view in (self._numbers, self._slots, self._whole):
            view.release()


class _Partner:
    """Another process for the time of a `with`; it inherits what it is given."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        # Inheriting an unnamed mapping leaves nothing behind, whatever happens to either process.
        self._process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.join(LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _times(streams: Sequence[float], pings: Sequence[float]) -> LinkTimes:
    """Medians; the first stream touched its memory for the first time and does not count."""
    return LinkTimes(_STREAM_BYTES / statistics.median(streams[1:]), statistics.median(pings) / 2)


# --- between GPUs ---


def pairs_to_measure(node: Node) -> list[Link]:
    """The first link of every label between two devices of `node`."""
    devices = {device.label for device in node.devices}
    first: dict[str, Link] = {}
    for link in node.links:
        if devices.issuperset(link.ends):
            first.setdefault(link.label, link)
    return list(first.values())


def _measure_gpus(node: Node) -> LinkProbe:
    import torch

    if len(node.devices) < 2:
        return LinkProbe(not_measured=("links between GPUs: the node has one",))
    chosen = pairs_to_measure(node)
    if not chosen:
        return LinkProbe(not_measured=("links between GPUs: nothing tells which pairs are linked alike",))
    if not torch.cuda.is_available():
        return LinkProbe(not_measured=("links between GPUs: torch can use none of them",))
    ordinals = _ordinals(node)
    links, reasons = [], []
    for link in chosen:
        try:
            one, other = (ordinals[end] for end in link.ends)
            # A link is as good as its worse direction.
            ways = [time_copy(one, other), time_copy(other, one)]
        except KeyError as missing:
            reasons.append(f"{link.label}: torch does not see {missing.args[0]}")
        except RuntimeError as problem:  # torch's own, for want of memory too
            reasons.append(f"{link.label} between {' and '.join(link.ends)}: {str(problem).splitlines()[0]}")
        else:
            rate, latency_s = min(way.bytes_per_s for way in ways), max(way.latency_s for way in ways)
            links.append(dataclasses.replace(link, bytes_per_s=rate, latency_s=latency_s, source="measured"))
    return LinkProbe(tuple(links), tuple(reasons))


def _ordinals(node: Node) -> dict[str, int]:
    """What torch calls each device: by UUID where both tell it, else by the order of those that may be seen."""
    import torch

    uuids = {}
    for ordinal in range(torch.cuda.device_count()):
        uuid = str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", ""))
        uuids[uuid.removeprefix("GPU-")] = ordinal
    ordinals = {}
    for place, device in enumerate(node.devices):
        seen_as = uuids.get(device.uuid.removeprefix("GPU-")) if device.uuid else place
        if seen_as is not None and seen_as < torch.cuda.device_count():
            ordinals[device.label] = seen_as
    return ordinals


def time_copy(source: int, target: int) -> LinkTimes:
    """Copies of 256 MiB and of 4 bytes from one GPU of this process to another, by torch's numbers for them."""
    import torch

    def seconds(num_bytes: int, num_copies: int) -> list[float]:
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{source}")
        here = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{target}")
        times = []
        for _ in range(num_copies + 2):  # two to warm up
            for device in (source, target):
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            here.copy_(there)
            for device in (source, target):
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return times[2:]

    stream_s = statistics.median(seconds(_COPY_BYTES, _NUM_COPIES))
    return LinkTimes(_COPY_BYTES / stream_s, statistics.median(seconds(4, 10 * _NUM_COPIES)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.measure.link_probe", description=__doc__)
    parser.add_argument("folder", type=Path, help="with node0.json …; links0.json … are left there")
    folder: Path = parser.parse_args().folder
    rank = env.worker_facts().rank
    node = from_mapping(Node, json.loads((folder / NODE_FILE.format(rank=rank)).read_text(encoding="utf-8")))
    measure_links(node).save(folder / LINKS_FILE.format(rank=rank))


if __name__ == "__main__":
    main()
