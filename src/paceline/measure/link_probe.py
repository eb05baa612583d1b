"""The program that times links inside a node, one worker on every node: `python -m paceline.measure.link_probe`.

It reads a `LinkRequest`; every worker leaves a `LinkProbe`, links0.json on the first node and so on. On GPUs copies
between two of them are timed, one pair for every label; on CPU what two processes send each other through shared memory
and through loopback.
"""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline import env
from paceline.errors import reason_of
from paceline.measure.program import Report, run_program, unreported
from paceline.measure.stopwatch import median_s
from paceline.measure.values import LINKS_FILE, LinkProbe, LinkRequest
from paceline.measure.which_links import links_to_time
from paceline.spec import Link, Node

SHARED_MEMORY, LOOPBACK = "SHM", "TCP"
"""Labels of the links between CPU workers of one node."""

LIMIT_S = 30.0
"""Time limit of one exchange, which takes milliseconds."""
_STREAM_BYTES = 64 * 2**20
_SLOT_BYTES = 256 * 2**10
_NUM_SLOTS = 4
_NUM_STREAMS = 5
_NUM_PINGS = 500
_COPY_BYTES = 256 * 2**20
_NUM_COPIES = 10


@dataclass(frozen=True)
class LinkTimes:
    """Bandwidth and latency of one direction of a link."""

    bytes_per_s: float
    latency_s: float
    """Until the first byte has arrived."""


def probe_own_node(request: LinkRequest, _report: Report = unreported) -> LinkProbe:
    """Time the links inside the node of the request that this worker is on."""
    return measure_links(request.nodes[env.worker_facts().rank])


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
            reasons.append(f"{what}: {reason_of(problem)}")
        else:
            links.append(Link(ends, label, times.bytes_per_s, times.latency_s, "measured"))
    return LinkProbe(tuple(links), tuple(reasons))


# --- between CPU workers ---


def time_loopback() -> LinkTimes:
    """Two processes on a TCP connection: a byte there and back, then a stream one way."""
    with socket.create_server(("127.0.0.1", 0)) as server, _partner(_send_on_loopback, server.getsockname()[1]):
        server.settimeout(LIMIT_S)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def ask(question: bytes, answer: memoryview) -> None:
                connection.sendall(question)
                _receive(connection, answer)

            byte, stream = memoryview(bytearray(1)), memoryview(bytearray(_STREAM_BYTES))
            ping_s = median_s(lambda: ask(b"?", byte), _NUM_PINGS)
            stream_s = median_s(lambda: ask(b"!", stream), _NUM_STREAMS)
    return LinkTimes(_STREAM_BYTES / stream_s, ping_s / 2)


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
    """Two processes on one mapping: a counter there and back, then a stream one way through a ring of slots.

    Raises:
        RuntimeError: this processor may show stores to others in another order, so that the ring would not be safe.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(
            f"it needs a processor that keeps the order of stores, which {platform.machine()} does not promise"
        )
    ring = _Ring(mmap.mmap(-1, mmap.PAGESIZE + _NUM_SLOTS * _SLOT_BYTES))
    with _partner(_send_through_memory, ring):
        arrived = memoryview(bytearray(_STREAM_BYTES))

        def ping() -> None:
            ring.counters[_MINE] += 1
            ring.wait_for(_THEIRS, ring.counters[_MINE])

        def stream() -> None:
            ring.counters[_START] += 1
            ring.receive(arrived)

        ping_s = median_s(ping, _NUM_PINGS, num_warmup=0)
        stream_s = median_s(stream, _NUM_STREAMS, num_warmup=1)
    return LinkTimes(_STREAM_BYTES / stream_s, ping_s / 2)


def _send_through_memory(ring: _Ring) -> None:
    for number in range(1, _NUM_PINGS + 1):
        ring.wait_for(_MINE, number)
        ring.counters[_THEIRS] = number
    stream = memoryview(bytes(_STREAM_BYTES))
    for number in range(1, _NUM_STREAMS + 2):
        ring.wait_for(_START, number)
        ring.send(stream)


_MINE, _THEIRS, _START, _FILLED, _TAKEN = range(0, 80, 16)
"""Places of the counters: each in a cache line of its own."""


class _Ring:
    """Slots under way between two processes, and counters that say whose they are.

    A counter is eight aligned bytes of shared memory; it only grows, and one process alone writes it.
    """

    def __init__(self, shared: mmap.mmap) -> None:
        whole = memoryview(shared)
        self.counters = whole[: mmap.PAGESIZE].cast("q")
        self._slots = whole[mmap.PAGESIZE :]

    def wait_for(self, counter: int, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.counters[counter] < number:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise RuntimeError("the other process does not answer")

    def send(self, stream: memoryview) -> None:
        for at in range(0, len(stream), _SLOT_BYTES):
            number = self.counters[_FILLED]
            self.wait_for(_TAKEN, number + 1 - _NUM_SLOTS)
            self._slot(number)[:] = stream[at : at + _SLOT_BYTES]
            self.counters[_FILLED] = number + 1

    def receive(self, into: memoryview) -> None:
        for at in range(0, len(into), _SLOT_BYTES):
            number = self.counters[_TAKEN]
            self.wait_for(_FILLED, number + 1)
            into[at : at + _SLOT_BYTES] = self._slot(number)
            self.counters[_TAKEN] = number + 1

    def _slot(self, number: int) -> memoryview:
        begin = number % _NUM_SLOTS * _SLOT_BYTES
        return self._slots[begin : begin + _SLOT_BYTES]


@contextmanager
def _partner(work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """A context in which another process runs `work`; it inherits the arguments."""
    # Inheriting an unnamed mapping leaves nothing behind, whatever happens to either process.
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield
        process.join(LIMIT_S)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


# --- between GPUs ---


def _measure_gpus(node: Node) -> LinkProbe:
    import torch

    if len(node.devices) < 2:
        return LinkProbe(not_measured=("links between GPUs: the node has one",))
    chosen = links_to_time(node)
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
            directions = [time_copy(one, other), time_copy(other, one)]
        except KeyError as missing:
            reasons.append(f"{link.label}: torch does not see {missing.args[0]}")
        except RuntimeError as problem:  # torch's own, for want of memory too
            reasons.append(f"{link.label} between {' and '.join(link.ends)}: {str(problem).splitlines()[0]}")
        else:
            rate, latency_s = min(d.bytes_per_s for d in directions), max(d.latency_s for d in directions)
            links.append(dataclasses.replace(link, bytes_per_s=rate, latency_s=latency_s, source="measured"))
    return LinkProbe(tuple(links), tuple(reasons))


def _ordinals(node: Node) -> dict[str, int]:
    """Torch's number for each device: found by UUID where both tell it, else by the order of visible GPUs."""
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

    devices = (torch.device("cuda", source), torch.device("cuda", target))

    def copy_s(num_bytes: int, num_copies: int) -> float:
        sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in devices)
        return median_s(lambda: received.copy_(sent), num_copies, *devices, num_warmup=2)

    return LinkTimes(_COPY_BYTES / copy_s(_COPY_BYTES, _NUM_COPIES), copy_s(4, 10 * _NUM_COPIES))


if __name__ == "__main__":
    run_program(__doc__, LinkRequest, probe_own_node, LINKS_FILE)
