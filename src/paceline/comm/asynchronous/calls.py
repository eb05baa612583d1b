"""Calls of workers to servers: messages of a process group that nothing else uses.

A worker makes one call after the other. A server answers each worker in a thread of its own, so that a call which waits
for its answer holds up no other.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLost
from paceline.object_collectives import decode, device_of, encode, transfer_message

_REQUEST, _ANSWER = 1 << 20, (1 << 20) + 1
"""Tags of messages: apart from those that collectives of the group use."""
_LEAVE, _RESULT, _ERROR = "leave", "result", "error"
_FAREWELL_S = 10.0
"""The longest wait, at the end, for a worker that does not say that it leaves. A thread that still waits for a message
while the interpreter ends may abort the process."""


class Calls:
    """One worker's calls to the others, and its answers to theirs."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        handlers: Mapping[str, Callable[..., Any]],
        on_leave: Callable[[int], None],
        classes: Sequence[type],
    ) -> None:
        """
        Args:
            group: all workers, over Gloo, with a timeout that a run does not reach: a server waits for as long for the
                next call.
            timeout_s: the longest wait for a server to take a call, and for its answer.
            handlers: what others may call here, by name; none: this worker is no server.
            on_leave: called with a worker's rank when it leaves or is lost.
            classes: the dataclasses that messages may contain.
        """
        self._group = group
        self._rank = dist.get_rank(group)
        self._timeout_s = timeout_s
        self._handlers = handlers
        self._on_leave = on_leave
        self._classes = classes
        self._is_abandoned = False
        callers = [rank for rank in range(dist.get_world_size(group)) if rank != self._rank and handlers]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"paceline-server-{rank}", daemon=True)
            for rank in callers
        ]
        for thread in self._threads:
            thread.start()

    def call(self, rank: int, name: str, *arguments: Any) -> Any:
        """What handler `name` of worker `rank` returns."""
        return self.call_each({rank: (name, *arguments)})[0]

    def call_each(self, calls: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """What several workers' handlers return: (name, *arguments) for each rank, all at once.

        Raises:
            PeerLost: a worker cannot be reached, or does not answer in time; says which.
            RuntimeError: a handler raised an exception; has its traceback.
        """
        for rank, call in calls.items():
            if rank != self._rank:
                with self._lost_if_unreachable(rank):
                    self._send(call, rank, _REQUEST, self._timeout_s)
        return [self._answer_of(rank, *call) for rank, call in calls.items()]

    def close(self, servers: Sequence[int], *, is_abandoned: bool) -> None:
        """Leave the servers, and wait until the other workers have left this one. `is_abandoned`: whether the others
        are to hear, instead of an answer, that this worker has left."""
        self._is_abandoned = is_abandoned
        deadline_s = time.monotonic() + _FAREWELL_S
        for rank in servers:
            if rank != self._rank:
                with contextlib.suppress(RuntimeError):  # it is gone
                    self._send((_LEAVE,), rank, _REQUEST, _FAREWELL_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _answer_of(self, rank: int, name: str, *arguments: Any) -> Any:
        if rank == self._rank:
            return self._handlers[name](*arguments)
        with self._lost_if_unreachable(rank):
            kind, answer = self._receive(rank, _ANSWER, self._timeout_s)
        if kind == _LEAVE:
            raise _lost(rank, "it has left the run")
        if kind == _ERROR:
            raise RuntimeError(f"On worker {rank}:\n{answer}")
        return answer

    @contextlib.contextmanager
    def _lost_if_unreachable(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _lost(rank, str(error)) from error

    def _serve(self, rank: int) -> None:
        """Answer one worker's calls until it leaves or is lost."""
        with contextlib.suppress(RuntimeError):  # the connection is closed
            while True:
                name, *arguments = self._receive(rank, _REQUEST)
                if name == _LEAVE:
                    break
                answer: tuple[str, Any] = (_LEAVE, None)
                if not self._is_abandoned:
                    try:
                        answer = (_RESULT, self._handlers[name](*arguments))
                    except Exception:
                        answer = (_ERROR, traceback.format_exc())
                self._send(answer, rank, _ANSWER)
        self._on_leave(rank)

    def _send(self, value: Any, rank: int, tag: int, timeout_s: float | None = None) -> None:
        """Send a value to a worker, which has to call `_receive` with this tag. `timeout_s`: the longest wait for each
        of the two parts of the message, after which the group is of no more use; None: that of the group."""

        def transfer(tensor: Tensor) -> None:
            _wait(dist.isend(tensor, group=self._group, group_dst=rank, tag=tag), timeout_s)

        transfer_message(encode(value, self._classes), transfer, device_of(self._group))

    def _receive(self, rank: int, tag: int, timeout_s: float | None = None) -> Any:
        """The value that a worker sends by `_send`."""

        def transfer(tensor: Tensor) -> None:
            _wait(dist.irecv(tensor, group=self._group, group_src=rank, tag=tag), timeout_s)

        return decode(transfer_message(None, transfer, device_of(self._group)), self._classes)


def _wait(work: dist.Work | None, timeout_s: float | None) -> None:
    assert work is not None
    _ = work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))


def _lost(rank: int, reason: str) -> PeerLost:
    return PeerLost(
        f"Worker {rank}, a server of asynchronous training, cannot be reached any more ({reason}); start again from "
        "the last checkpoint.",
        rank=rank,
    )
