"""Who gives out the work of `parameter_server_async`: one of the servers, the first.

Workers ask it for shards and report what became of them. A question that has no answer yet waits as a future, never in
a thread, and is sent back after a moment to be asked again, so that every call can have a short timeout.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import rpc

from paceline.comm.parameter_server_async.ledger import Ledger, ShardSum, Task
from paceline.comm.parameter_server_async.remote import call, is_unreachable, serve, served
from paceline.comm.tree_exact import Block

POLL_S = 0.25
"""How long a question waits before it is sent back, and how often workers are looked after."""


@dataclass(frozen=True)
class Request:
    """What a worker says when it asks for work."""

    rank: int
    until: int
    """It wants shards of batches before this one."""
    most: int
    """It can take so many at once."""
    seen: int
    """It knows of all batches before this one that they are finished."""
    wants_rest: bool = False
    """All should meet as soon as what is begun is done."""
    report: Report | None = None


@dataclass(frozen=True)
class Report:
    """What became of a task."""

    task: Task
    arrived: bool
    """All servers have all of its shards."""
    blocks: tuple[Block, ...]
    statistics: tuple[Tensor, ...]
    """The sum of the shards' statistics, one for every block."""


@dataclass(frozen=True)
class Reply:
    """What it hears. Neither a task nor the end of its batches: ask again."""

    finished: int
    """All batches before this one are in the parameters, on every server."""
    rest_at: int | None = None
    """With all batches before this one finished, all meet: somebody wanted it."""
    statistics: tuple[Tensor, ...] = ()
    """Of every batch from `Request.seen` to `finished` - 1: the sum over its shards."""
    task: Task | None = None
    lost_server: int | None = None
    is_given_up: bool = False
    """The worker itself could not be reached for a while; others have its work."""


@dataclass(frozen=True)
class Meeting:
    """How a barrier stands: who has not come yet and, once all have, who is not there any more."""

    missing: frozenset[int]
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Question:
    answer: Callable[[], Reply | Meeting | None]
    """None: not yet."""
    otherwise: Callable[[], Reply | Meeting]
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)
    asked_at_s: float = field(default_factory=time.monotonic)


class Coordinator:
    """Gives out shards, adds up their statistics, and notices who is lost."""

    def __init__(
        self,
        ledger: Ledger,
        num_shards: Callable[[int], int],
        ranks: Sequence[int],
        servers: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._ledger = ledger
        self._num_shards = num_shards
        self._rank = servers[0]
        self._servers = servers
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._questions: list[_Question] = []
        self._present = set(ranks)
        self._lost: list[int] = []
        self._seen = dict.fromkeys(ranks, ledger.finished)
        self._sums: dict[int, ShardSum] = {}
        self._statistics: dict[int, Tensor] = {}
        self._arrived: dict[int, set[int]] = defaultdict(set)
        self._held: dict[int, Meeting] = {}
        self._rest_at: int | None = None
        self._pings: dict[int, torch.futures.Future[Any]] = {}
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._keep_watch, name="coordinator", daemon=True)
        serve(self)

    def start(self) -> None:
        """Begin to look after the workers, once they can be called."""
        self._watch.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._watch.is_alive():
            self._watch.join()

    def ask(self, request: Request) -> torch.futures.Future[Reply]:
        """Take what the worker has done and find it something new."""
        with self._changed:
            if request.report is not None:
                self._take_report(request.report)
            if request.wants_rest and self._rest_at is None:
                self._rest_at = max(self._ledger.next_batch, request.seen + 1)  # nobody rests without having worked
            self._seen[request.rank] = request.seen
            known_to_all = min((self._seen[rank] for rank in self._present), default=request.seen)
            self._statistics = {batch: total for batch, total in self._statistics.items() if batch >= known_to_all}
        return self._wait(lambda: self._task_for(request), lambda: self._reply(request))

    def meet(self, rank: int, number: int) -> torch.futures.Future[Meeting]:
        """Wait until all workers that are still there have come to meeting `number`."""
        with self._changed:
            self._arrived[number].add(rank)
        return self._wait(lambda: self._held_meeting(number), lambda: Meeting(self._missing(number)))

    def leave(self, rank: int) -> None:
        """`rank` is lost, or goes of its own accord: it will not be waited for."""
        with self._changed:
            self._lose(rank)
        self._answer_all()

    def wait_until_alone(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._present <= {self._rank}, timeout_s)

    def _take_report(self, report: Report) -> None:
        task, first = report.task, self._ledger.finished
        arrived = report.arrived
        if arrived and task.batch >= first:
            total = self._sums.setdefault(task.batch, ShardSum(self._num_shards(task.batch)))
            arrived = total.add(report.blocks, report.statistics)
        self._ledger.finish(task, arrived)
        for batch in range(first, self._ledger.finished):
            self._statistics[batch] = self._sums.pop(batch).total()

    def _task_for(self, request: Request) -> Reply | None:
        if request.rank not in self._present:
            return Reply(self._ledger.finished, is_given_up=True)
        # The first one: those that come after it may have gone because of it.
        lost_servers = [rank for rank in self._lost if rank in self._servers]
        if lost_servers:
            return Reply(self._ledger.finished, lost_server=lost_servers[0])
        until = request.until if self._rest_at is None else min(request.until, self._rest_at)
        task = self._ledger.take(request.rank, request.most, until, time.monotonic())
        return self._reply(request, task) if task or self._ledger.finished >= until else None

    def _reply(self, request: Request, task: Task | None = None) -> Reply:
        finished = self._ledger.finished
        statistics = tuple(self._statistics[batch] for batch in range(request.seen, finished))
        return Reply(finished, self._rest_at, statistics, task)

    def _held_meeting(self, number: int) -> Meeting | None:
        if number not in self._held and not self._missing(number):
            # Who is lost is written down once, so that all who came hear the same.
            self._held[number] = Meeting(frozenset(), frozenset(self._lost))
            self._rest_at = None
        return self._held.get(number)

    def _missing(self, number: int) -> frozenset[int]:
        return frozenset(self._present - self._arrived[number])

    def _lose(self, rank: int) -> None:
        if rank in self._present:
            self._present.remove(rank)
            self._lost.append(rank)
            self._ledger.give_back(rank)

    def _wait(
        self, answer: Callable[[], Reply | Meeting | None], otherwise: Callable[[], Reply | Meeting]
    ) -> torch.futures.Future[Any]:
        question = _Question(answer, otherwise)
        with self._changed:
            self._questions.append(question)
        self._answer_all()
        return question.future

    def _answer_all(self) -> None:
        with self._changed:
            overdue = time.monotonic() - POLL_S
            answers: list[tuple[_Question, Reply | Meeting]] = []
            waiting = []
            for question in self._questions:
                answer = question.answer() or (question.otherwise() if question.asked_at_s <= overdue else None)
                if answer is None:
                    waiting.append(question)
                else:
                    answers.append((question, answer))
            self._questions = waiting
            self._changed.notify_all()
        for question, answer in answers:  # it sends the answer: not under the lock
            question.future.set_result(answer)

    def _keep_watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            with self._changed:
                self._ledger.expire(time.monotonic())
                for rank, ping in list(self._pings.items()):
                    if ping.done():
                        del self._pings[rank]
                        if is_unreachable(ping):
                            self._lose(rank)
                unasked = self._present - self._pings.keys() - {self._rank}
            # Calling may block for a moment, so not under the lock; only this thread touches the pings.
            self._pings |= {rank: call(rank, is_there, timeout_s=self._timeout_s) for rank in unasked}
            self._answer_all()


def is_there() -> bool:
    """A sign of life."""
    return True


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def ask(request: Request) -> torch.futures.Future[Reply]:
    """`Coordinator.ask` of this process, to be called from others."""
    return _coordinator().ask(request)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def meet(rank: int, number: int) -> torch.futures.Future[Meeting]:
    """`Coordinator.meet` of this process, to be called from others."""
    return _coordinator().meet(rank, number)


def leave(rank: int) -> None:
    """`Coordinator.leave` of this process, to be called from others."""
    _coordinator().leave(rank)


def _coordinator() -> Coordinator:
    return cast(Coordinator, served(Coordinator))
