"""Notices that a worker is gone where the backend does not say so, and lets those that wait for it go on.

NCCL's kernels wait on the GPU for messages of a process that has ended, and the program waits for the GPU. So every
worker has a thread that waits for a message of each of its two neighbours in a ring, over Gloo. The message is the end
of the run; a neighbour that ends without one closes its sockets. The thread then says so to its other neighbour, and
aborts the communicator of all workers, which ends its kernels. What these leave in memory means nothing, so no update
may stand behind them in the GPU's queue: a worker makes one only once its gradients have arrived.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PeerLost
from paceline.process_groups import open_host_group

_END = -1
"""The message of a worker at the end of its run; any other is the rank of a worker that is lost."""
_RUN_S = 10 * 365 * 24 * 3600.0
"""The maximum wait for the end of a run."""
_NOTICE_S = 2.0
"""The maximum wait for the loss behind an error of NCCL's, and for its abort."""
_FAREWELL_S = 60.0
"""The maximum wait for neighbours at the end of a run. A thread that waits for one still, and hears of it while the
interpreter ends, aborts the process."""


class PeerWatch:
    """One worker's watch over its neighbours, from its beginning to `close`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, abort: Callable[[], None]) -> None:
        """A collective of all workers of `group`.

        Args:
            group: all workers of the run, over Gloo; the watch alone uses it, and it waits for ever.
            abort: ends what waits for a lost worker; called in another thread.
        """
        self._group = group
        self._device = device
        self._abort = abort
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._noticing = threading.Lock()
        self._is_over = threading.Event()
        """Set when a loss has been noticed and nothing waits for the lost worker any more."""
        self._lost: int | None = None
        neighbours = dict.fromkeys([(self._rank + 1) % self._world_size, (self._rank - 1) % self._world_size])
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._threads = {
            rank: threading.Thread(target=self._await, args=(rank,), name=f"paceline-watch-{rank}", daemon=True)
            for rank in neighbours
        }
        for thread in self._threads.values():
            thread.start()

    def cause_of(self, error: BaseException) -> PeerLost | None:
        """The loss that led to an error of this worker; None where all workers are there.

        Whatever is raised after a loss may come of what aborted collectives have left.
        """
        if isinstance(error, dist.DistError):  # NCCL may be told before the thread is
            self._is_over.wait(_NOTICE_S)
        if self._lost is None:
            return None
        self._is_over.wait(_NOTICE_S)
        return self._error(self._lost)

    def _error(self, rank: int) -> PeerLost:
        return PeerLost(f"Rank {rank} ended while this worker was waiting for it.", rank=rank)

    def check(self, *, has_waited: bool = False) -> None:
        """Wait for all that this worker's device has been given: sums of all workers' gradients among it.

        Args:
            has_waited: whether the host has just done so, by reading what came of these sums.

        Raises:
            PeerLost: a worker is gone, so that the sums may mean nothing.
        """
        if self._device.type == "cuda" and not has_waited:
            torch.cuda.current_stream(self._device).synchronize()
        if self._lost is not None:  # set before anything is aborted
            raise self._error(self._lost)

    def close(self) -> None:
        """Say that this worker's run is over, and wait for the neighbours to say so."""
        if self._lost is None:
            for rank in self._threads:
                self._send(_END, rank)
        deadline = time.monotonic() + _FAREWELL_S
        for thread in self._threads.values():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _await(self, neighbour: int) -> None:
        message = torch.zeros(1, dtype=torch.int64)
        try:
            work = dist.irecv(message, group=self._group, group_src=neighbour)
            assert work is not None
            work.wait(timedelta(seconds=_RUN_S))
        except RuntimeError:  # the connection is closed
            message.fill_(neighbour)
        if int(message) != _END:
            self._notice(int(message))

    def _notice(self, rank: int) -> None:
        with self._noticing:
            if self._lost is not None:
                return
            self._lost = rank
            for neighbour in self._threads:
                if neighbour != rank:
                    with contextlib.suppress(RuntimeError):
                        self._send(rank, neighbour)
            try:
                self._abort()
            finally:
                self._is_over.set()

    def _send(self, text: int, rank: int) -> None:
        message = torch.tensor([text])
        self._sent.append((dist.isend(message, group=self._group, group_dst=rank), message))


def watch_peers(world: dist.ProcessGroup | None, device: torch.device) -> PeerWatch | None:
    """Watch over the workers of a run whose backend lets them wait for a lost one; a collective. None: not needed."""
    if world is None or dist.get_backend(world) != "nccl":
        return None
    return PeerWatch(open_host_group(_RUN_S), device, world.abort)
