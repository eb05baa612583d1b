"""What a worker exchanges with the servers and the coordinator while it computes.

One thread does it, call after call: it delivers what was computed, and shortly before a shard is done it fetches the
next one and its parameters. So a call costs the worker time only where there is nothing to compute yet. The next shard
is not asked for any earlier, because one that waits at a slow worker is one that others cannot compute.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from paceline.comm.parameter_server_async.messages import NextWork, Task, TaskReport, WorkReply, WorkRequest
from paceline.comm.parameter_server_async.node import ShardSums
from paceline.comm.parameter_server_async.peers import Peers, lost
from paceline.comm.parameter_server_async.server import Span
from paceline.errors import PeerLost

COORDINATOR_ROLE = "which gives out the work"
SERVER_ROLE = "which holds a slice of the parameters"

_FETCHES_AHEAD = 2
"""The next shard is asked for as long before the end of this one as so many fetches take."""
_FORGET = 1.1
"""How fast a short shard and a long fetch are forgotten, a factor a shard: to ask a little early costs less than to ask
late."""


@dataclass(frozen=True)
class Fetched:
    """The next work, and the parameters with it: None if the worker has them already."""

    next_work: NextWork
    values: Tensor | None = None


class Exchange:
    """One worker's exchange; where a node acts as one worker, its leader's."""

    def __init__(
        self,
        peers: Peers,
        rank: int,
        servers: Sequence[int],
        spans: Sequence[Span],
        *,
        staleness: int,
        most: int,
        first_batch: int,
    ) -> None:
        """`most`: how many shards the worker, or the workers of its node, can compute at once."""
        self._peers = peers
        self._rank = rank
        self._servers = servers
        self._spans = spans
        self._staleness = staleness
        self._most = most
        self._seen = first_batch
        self._thread = ThreadPoolExecutor(1, "paceline-exchange")
        self._under_way: deque[Future[Fetched]] = deque()
        self._shard_s = math.inf
        self._fetch_s = 0.0
        self.begin(first_batch)

    def begin(self, until: int, weight_at: int | None = None) -> None:
        """Work begins: no gradient is in flight, and all servers have made as many updates."""
        self._first = self._seen
        self._until = until
        self._weight_at = weight_at
        self._finished = self._seen
        self._version: int | None = None
        self._has_task = False

    def next(self, wants_pause: bool) -> Fetched:
        """The next message: statistics, work, or the end of all work.

        Raises:
            PeerLost: a server is lost, or the others gave this worker up.
        """
        if not self._under_way:
            self._begin_to(self._ask, wants_pause)
        fetched = self._under_way.popleft().result()
        while fetched.next_work.is_last and self._under_way:
            self._under_way.popleft().result()  # what was asked for in vain
        return fetched

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While a task is computed inside the block, the next one is fetched shortly before the end."""
        began_s, is_done = time.monotonic(), threading.Event()
        self._begin_to(self._ask_ahead, max(0.0, self._shard_s - _FETCHES_AHEAD * self._fetch_s), is_done)
        try:
            yield
        finally:
            is_done.set()
        self._shard_s = min(time.monotonic() - began_s, _FORGET * self._shard_s)

    def deliver(self, task: Task, version: int, sums: ShardSums, wants_pause: bool) -> None:
        """Begin to send what was computed with the parameters after `version` updates."""
        self._begin_to(self._push, task, version, sums, wants_pause)

    def ask_coordinator(self, name: str, *arguments: Any) -> Any:
        return self._peers.call(self._servers[0], name, *arguments).result(COORDINATOR_ROLE)

    def ask_servers(self, name: str, *arguments: Any) -> list[Any]:
        """Call all servers at once; what each of them answered."""
        return self._answers([(name, *arguments)] * len(self._servers))

    def close(self) -> None:
        """End the thread, once its calls have failed or have been answered."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_to(self, act: Callable[..., Fetched], *arguments: Any) -> None:
        self._under_way.append(self._thread.submit(act, *arguments))

    # What follows runs in the exchange's own thread.

    def _ask_ahead(self, wait_s: float, is_done: threading.Event) -> Fetched:
        """The next task, if there is one already `wait_s` from now; what is done earlier is delivered first."""
        self._has_task = False
        if is_done.wait(min(wait_s, threading.TIMEOUT_MAX)):
            return Fetched(NextWork(version=self._version))
        return self._ask(is_ahead=True)

    def _push(self, task: Task, version: int, sums: ShardSums, wants_pause: bool) -> Fetched:
        """Send every server its slice, and report whether all of them count these shards now."""
        at = self._weight_at
        counted = self._answers(
            [
                # Copies where a server keeps them: the one in this process gets no message but the tensor itself.
                (
                    "push",
                    task.batch,
                    version,
                    self._version_for(self._finished),
                    sums.blocks,
                    [gradient[start:stop].clone() for gradient in sums.gradients],
                    sums.used,
                    [] if at is None else [statistics[at : at + 1].clone() for statistics in sums.statistics],
                )
                for start, stop in self._spans
            ]
        )
        return self._ask(wants_pause, TaskReport(task, all(counted), sums.blocks, sums.statistics))

    def _ask(self, wants_pause: bool = False, report: TaskReport | None = None, is_ahead: bool = False) -> Fetched:
        """Report, and ask for a task where the worker has none; the task's parameters come with it."""
        began_s = time.monotonic()
        most = 0 if self._has_task else self._most
        request = WorkRequest(self._rank, self._until, most, self._seen, is_ahead, wants_pause, report)
        reply = cast(WorkReply, self.ask_coordinator("ask", request))
        if reply.lost_server is not None:
            raise lost(reply.lost_server, SERVER_ROLE, "it gives no sign of life")
        if reply.is_given_up:
            raise PeerLost(
                f"Worker {self._rank} could not be reached for {self._peers.timeout_s:g} s, so the others went on "
                "without it; give it more time (timeout_s), or start again from the last checkpoint.",
                rank=self._rank,
            )
        self._until = self._until if reply.pause_at is None else min(self._until, reply.pause_at)
        self._finished = reply.finished
        statistics = tuple(enumerate(reply.statistics, self._seen))
        self._seen += len(statistics)
        is_last = reply.finished >= self._until
        task, version, values = reply.task, self._version, None
        if is_last or task is not None:
            version = self._until if task is None else self._version_for(task.batch)
            if version != self._version and (values := self._pull(version)) is None:
                task, version = None, self._version  # others have computed it since
        self._version = version
        self._has_task |= task is not None
        if is_ahead and task is not None:
            self._fetch_s = max(time.monotonic() - began_s, self._fetch_s / _FORGET)
        return Fetched(NextWork(statistics, task, version, is_last), values)

    def _version_for(self, batch: int) -> int:
        """After how many updates the parameters are on which a shard of `batch` is computed."""
        return max(self._first, batch - self._staleness)

    def _pull(self, version: int) -> Tensor | None:
        """The parameters after so many updates; None: nobody needs them now."""
        slices = self.ask_servers("pull", version)
        if any(values is None for values in slices):
            return None
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _answers(self, questions: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Ask every server its own question, all at once; what each of them answered."""
        calls = [self._peers.call(rank, *question) for rank, question in zip(self._servers, questions, strict=True)]
        return [call.result(SERVER_ROLE) for call in calls]
