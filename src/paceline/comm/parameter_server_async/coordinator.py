"""Who gives out the work of `parameter_server_async`: one of the servers, the first.

Workers ask it for shards and report what became of them. A question that has no answer yet waits in the thread of its
caller's connection for a moment, and is then sent back to be asked again, so that every call can have a short timeout.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from paceline.comm.parameter_server_async.ledger import Ledger, ShardSum
from paceline.comm.parameter_server_async.messages import Task, TaskReport, WorkReply, WorkRequest
from paceline.comm.parameter_server_async.peers import Call, Peers
from paceline.errors import PeerLost

T = TypeVar("T")

WORKER_ROLE = "which computes shards"

POLL_S = 0.25
"""How long a question waits before it is sent back, and how often workers are looked after."""


class Coordinator:
    """Gives out shards, sums their statistics, and notices lost workers."""

    def __init__(
        self,
        ledger: Ledger,
        num_shards: Callable[[int], int],
        ranks: Sequence[int],
        servers: Sequence[int],
    ) -> None:
        self._ledger = ledger
        self._num_shards = num_shards
        self._rank = servers[0]
        self._servers = servers
        self._changed = threading.Condition()
        self._present = set(ranks)
        self._lost: list[int] = []
        self._seen = dict.fromkeys(ranks, ledger.finished)
        self._sums: dict[int, ShardSum] = {}
        self._statistics: dict[int, Tensor] = {}
        self._arrived: dict[int, set[int]] = defaultdict(set)
        self._passed: set[int] = set()
        self._pause_at: int | None = None
        self._pings: dict[int, Call] = {}
        self._stopped = threading.Event()
        self._watch: threading.Thread | None = None

    def start(self, peers: Peers) -> None:
        """Begin to look after the workers, now that they can be called."""
        self._watch = threading.Thread(target=self._keep_watch, args=(peers,), name="coordinator", daemon=True)
        self._watch.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._watch is not None:
            self._watch.join()

    def ask(self, request: WorkRequest) -> WorkReply:
        """Take what the worker has done and find it something new."""
        with self._changed:
            if request.report is not None:
                self._take_report(request.report)
            if request.wants_pause and self._pause_at is None:
                # At least one batch is finished before a pause.
                self._pause_at = max(self._ledger.next_batch, request.seen + 1)
            self._seen[request.rank] = request.seen
            known_to_all = min((self._seen[rank] for rank in self._present), default=request.seen)
            self._statistics = {batch: total for batch, total in self._statistics.items() if batch >= known_to_all}
            self._changed.notify_all()
            if request.is_ahead or not request.most:
                return self._task_for(request) or self._reply(request)
            return self._wait(lambda: self._task_for(request)) or self._reply(request)

    def barrier(self, rank: int, number: int) -> frozenset[int]:
        """Wait until all remaining workers have come to barrier `number`, for a while; returns those that have not."""
        with self._changed:
            self._arrived[number].add(rank)
            self._changed.notify_all()
            return frozenset() if self._wait(lambda: self._has_passed(number)) else self._missing(number)

    def leave(self, rank: int) -> None:
        """`rank` is lost, or goes of its own accord: it will not be waited for."""
        with self._changed:
            self._lose(rank)

    def wait_until_alone(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._present <= {self._rank}, timeout_s)

    def _take_report(self, report: TaskReport) -> None:
        task, first = report.task, self._ledger.finished
        arrived = report.arrived
        if arrived and task.batch >= first:
            total = self._sums.setdefault(task.batch, ShardSum(self._num_shards(task.batch)))
            arrived = total.add(report.blocks, report.statistics)
        self._ledger.finish(task, arrived)
        for batch in range(first, self._ledger.finished):
            self._statistics[batch] = self._sums.pop(batch).total()

    def _task_for(self, request: WorkRequest) -> WorkReply | None:
        if request.rank not in self._present:
            return WorkReply(self._ledger.finished, is_given_up=True)
        # The first one: those that come after it may have gone because of it.
        lost_servers = [rank for rank in self._lost if rank in self._servers]
        if lost_servers:
            return WorkReply(self._ledger.finished, lost_server=lost_servers[0])
        until = request.until if self._pause_at is None else min(request.until, self._pause_at)
        task = self._ledger.take(request.rank, request.most, until, time.monotonic()) if request.most else None
        return self._reply(request, task) if task or self._ledger.finished >= until else None

    def _reply(self, request: WorkRequest, task: Task | None = None) -> WorkReply:
        finished = self._ledger.finished
        statistics = tuple(self._statistics[batch] for batch in range(request.seen, finished))
        return WorkReply(finished, self._pause_at, statistics, task)

    def _has_passed(self, number: int) -> bool | None:
        """True once all have come to a barrier, for all of them alike, whoever is lost afterwards."""
        if number not in self._passed and not self._missing(number):
            self._passed.add(number)
            self._pause_at = None
        return number in self._passed or None

    def _missing(self, number: int) -> frozenset[int]:
        return frozenset(self._present - self._arrived[number])

    def _lose(self, rank: int) -> None:
        if rank in self._present:
            self._present.remove(rank)
            self._lost.append(rank)
            self._ledger.give_back(rank)
            self._changed.notify_all()

    def _wait(self, answer: Callable[[], T | None]) -> T | None:
        """What `answer` finds, asked again after every change; None: not within `POLL_S`. Call it under the lock."""
        give_up_at_s = time.monotonic() + POLL_S
        while (found := answer()) is None and (left_s := give_up_at_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
        return found

    def _keep_watch(self, peers: Peers) -> None:
        while not self._stopped.wait(POLL_S):
            with self._changed:
                self._ledger.expire(time.monotonic())
                self._changed.notify_all()
                unasked = self._present - self._pings.keys() - {self._rank}
            # Calls and their answers may block for a moment, so not under the lock; only this thread touches the pings.
            self._pings |= {rank: peers.call(rank, "is_there") for rank in unasked}
            for rank, ping in [(rank, ping) for rank, ping in self._pings.items() if ping.is_done]:
                del self._pings[rank]
                try:
                    ping.result(WORKER_ROLE)
                except PeerLost:
                    self.leave(rank)
