"""Links between workers that are threads of one process: what an algorithm sends is counted, and a deadlock is seen."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar, cast

import torch
from torch import Tensor

from paceline.comm.links import WIRE_DTYPES, Links

Outcome = TypeVar("Outcome")
Nodes = tuple[tuple[int, ...], ...]


class DeadlockError(AssertionError):
    """Every worker that is left waits for a message that nobody has sent."""


@dataclass
class Network:
    """The workers' messages under way, and the bytes that each worker has sent to each other one."""

    num_workers: int
    sent_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    _boxes: dict[tuple[int, int], deque[Tensor]] = field(default_factory=dict)
    _awaited: dict[int, int] = field(default_factory=dict)
    _at_work: set[int] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, work: Callable[[int], Outcome]) -> list[Outcome]:
        """What `work(rank)` returns on each worker."""

        def run_one(rank: int) -> Outcome:
            try:
                return work(rank)
            finally:
                with self._changed:
                    self._at_work.discard(rank)
                    self._changed.notify_all()

        self._at_work = set(range(self.num_workers))
        with ThreadPoolExecutor(self.num_workers) as threads:
            futures = [threads.submit(run_one, rank) for rank in range(self.num_workers)]
        errors = [error for future in futures if (error := future.exception())]
        if errors:  # the cause, not the deadlocks that follow from it
            raise min(errors, key=lambda error: isinstance(error, DeadlockError))
        assert not any(self._boxes.values()), "a message was sent that nobody received"
        return [future.result() for future in futures]

    def send(self, sender: int, receiver: int, message: Tensor) -> None:
        with self._changed:
            self.sent_bytes[sender, receiver] += message.nbytes
            self._boxes.setdefault((sender, receiver), deque()).append(message.clone())
            self._changed.notify_all()

    def receive(self, sender: int, receiver: int) -> Tensor:
        box = self._boxes.setdefault((sender, receiver), deque())
        with self._changed:
            self._awaited[receiver] = sender
            while not box:
                if all(self._waits_in_vain(rank) for rank in self._at_work):
                    self._changed.notify_all()
                    raise DeadlockError(f"rank {receiver} waits for rank {sender}, and nobody sends any more")
                self._changed.wait()
            del self._awaited[receiver]
            return box.popleft()

    def _waits_in_vain(self, rank: int) -> bool:
        return rank in self._awaited and not self._boxes[self._awaited[rank], rank]


@dataclass(frozen=True)
class MemoryLink:
    """One worker's side of a network, with what `paceline.comm.Links` offers to an algorithm."""

    network: Network
    rank: int
    nodes: Nodes
    wire_name: str = "float32"
    num_servers: int = 1

    @property
    def links(self) -> Links:
        return cast(Links, self)

    encode, message_for = Links.encode, Links.message_for

    @property
    def wire(self) -> torch.dtype | None:
        return WIRE_DTYPES[self.wire_name]

    @property
    def world_size(self) -> int:
        return self.network.num_workers

    @property
    def ring(self) -> tuple[int, ...]:
        return tuple(rank for node in self.nodes for rank in node)

    @property
    def node(self) -> tuple[int, ...]:
        return next(node for node in self.nodes if self.rank in node)

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(node[0] for node in self.nodes)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> SimpleNamespace:
        """Begin to send and to receive, which ends in `wait()`; empty messages are not sent at all."""
        for receiver, message in outgoing.items():
            assert message.is_contiguous()
            if message.numel():
                self.network.send(self.rank, receiver, message)

        def wait() -> None:
            for sender, place in incoming.items():
                if place.numel():
                    message = self.network.receive(sender, self.rank)
                    assert (message.numel(), message.dtype) == (place.numel(), place.dtype)
                    place.copy_(message.view_as(place))

        return SimpleNamespace(wait=wait)

    def reduce_in_node(self, values: Tensor) -> None:
        leader, *others = self.node
        if self.rank == leader:
            arriving = {rank: torch.empty_like(values) for rank in others}
            self.exchange({}, arriving).wait()
            for message in arriving.values():
                values.add_(message)
        else:
            self.exchange({leader: values}, {})
            values.fill_(torch.nan)  # undefined from here on

    def broadcast_in_node(self, values: Tensor) -> None:
        leader, *others = self.node
        if self.rank == leader:
            self.exchange(dict.fromkeys(others, values), {})
        else:
            self.exchange({}, {leader: values}).wait()

    def all_reduce(self, values: Tensor) -> None:
        self.reduce_in_node(values)
        self.broadcast_in_node(values)


def nodes_by_name(names: Sequence[int]) -> Nodes:
    """The ranks of each node, from the node of each rank, in the order of their first ranks."""
    return tuple(tuple(rank for rank, of in enumerate(names) if of == name) for name in dict.fromkeys(names))
