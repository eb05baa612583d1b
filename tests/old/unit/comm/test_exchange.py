"""What a worker exchanges while it computes: the next task comes before the end, and deliveries keep nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from paceline.comm.parameter_server_async.exchange import Exchange, Fetched
from paceline.comm.parameter_server_async.messages import Task, WorkReply, WorkRequest
from paceline.comm.parameter_server_async.node import ShardSums
from paceline.comm.parameter_server_async.peers import Call, Peers

TIMEOUT_S = 60.0
LAST_BATCH = 3


class _Server:
    """Coordinator and server in one, without a connection: one shard a batch, staleness 1."""

    timeout_s = TIMEOUT_S

    def __init__(self) -> None:
        self.requests: list[WorkRequest] = []
        self.pulled: list[int] = []
        self.is_asked_ahead = threading.Event()
        self.may_push = threading.Event()
        self.may_push.set()
        self.next_batch = 0
        self.finished = 0

    def call(self, rank: int, name: str, *arguments: Any) -> Call:
        return Call(rank, answer=getattr(self, name)(*arguments))

    def ask(self, request: WorkRequest) -> WorkReply:
        self.requests.append(request)
        if request.report is not None:
            self.finished += 1
        statistics = tuple(torch.zeros(1) for _ in range(request.seen, self.finished))
        task = None
        if request.most and self.next_batch < LAST_BATCH:
            task = Task(self.next_batch, self.next_batch, 0, 1)
            self.next_batch += 1
        if request.is_ahead:
            self.is_asked_ahead.set()
        return WorkReply(self.finished, None, statistics, task)

    def pull(self, version: int) -> torch.Tensor:
        self.pulled.append(version)
        return torch.full((3,), float(version))

    def push(self, *_: Any) -> bool:
        assert self.may_push.wait(TIMEOUT_S)
        return True


@contextmanager
def _exchange(server: _Server) -> Iterator[Exchange]:
    exchange = Exchange(cast(Peers, server), 0, [0], [(0, 3)], staleness=1, most=1, first_batch=0)
    exchange.begin(LAST_BATCH)
    try:
        yield exchange
    finally:
        server.may_push.set()
        exchange.close()


SUMS = ShardSums(((0, 1),), (torch.zeros(3),), torch.tensor([True]), (torch.zeros(1),))


def _deliver(exchange: Exchange, fetched: Fetched) -> None:
    assert fetched.next_work.task is not None and fetched.next_work.version is not None
    exchange.deliver(fetched.next_work.task, fetched.next_work.version, SUMS, wants_pause=False)


def _next_task(exchange: Exchange) -> Fetched:
    while (fetched := exchange.next(wants_pause=False)).next_work.task is None:
        assert not fetched.next_work.is_last
    return fetched


def test_the_next_task_is_fetched_while_one_is_computed_and_none_waits_for_a_delivery() -> None:
    server = _Server()
    with _exchange(server) as exchange:
        first = _next_task(exchange)
        with exchange.computing():
            pass  # how long a shard takes is not known yet
        assert not server.is_asked_ahead.is_set()
        _deliver(exchange, first)
        second = _next_task(exchange)
        with exchange.computing():
            assert server.is_asked_ahead.wait(TIMEOUT_S)
        server.may_push.clear()
        _deliver(exchange, second)
        third = _next_task(exchange)  # although the second is still being delivered
        assert third.next_work.task is not None and third.next_work.task.batch == 2
        assert not server.may_push.is_set()


def test_parameters_are_those_from_the_staleness_before_and_come_once() -> None:
    server = _Server()
    versions = []
    with _exchange(server) as exchange:
        while not (fetched := exchange.next(wants_pause=False)).next_work.is_last:
            if fetched.next_work.task is not None:
                versions.append(fetched.next_work.version)
                with exchange.computing():
                    pass
                _deliver(exchange, fetched)
        assert fetched.next_work.version == LAST_BATCH
    assert versions == [0, 0, 1]
    assert server.pulled == [0, 1, LAST_BATCH]


def test_a_wish_for_a_rest_goes_with_the_delivery() -> None:
    server = _Server()
    with _exchange(server) as exchange:
        first = _next_task(exchange)
        assert first.next_work.task is not None
        with exchange.computing():
            pass
        exchange.deliver(first.next_work.task, 0, SUMS, wants_pause=True)
        _next_task(exchange)
    assert [request.wants_pause for request in server.requests if request.report is not None] == [True]
