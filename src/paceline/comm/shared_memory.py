"""Memory that the CPU workers of one node share, and the collectives that go through it.

A vector passes in chunks small enough to stay in the caches. Chunk n goes through place n mod DEPTH of a ring, in
which every worker has one slot. A worker tells the others how far it is by three counters, each in cache lines of
its own:

    filled    its slot holds what it has to say about chunks below this number
    summed    its slot holds its part of the sum, too
    done      it needs nobody's slot for chunks below this number any more; only then may they be overwritten

Counters only ever grow and go on from call to call, so that calls follow one another without a barrier and no worker
can take an old chunk for a new one.

Nobody locks anything. That is right where a processor makes its stores visible in the order in which it did them and
does its loads in order (total store order, as x86 does): who sees a counter sees the values stored before it. On
other processors `is_possible` says no. A counter is eight aligned bytes, hence read and written as a whole.

Copies and sums are numpy's, which has a third of torch's overhead a call and copies faster; torch and numpy see the
same memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import LaunchError, PeerLost
from paceline.object_collectives import all_gather_objects

FOLDER = Path("/dev/shm")
DEPTH = 4
"""Chunks under way at once: one in each of three stages, and one for workers that are not quite in step."""
SLOT_BYTES_PER_WORKER = 256 * 1024
"""A chunk's bytes for every worker of the node: few enough for the caches, enough that one switch of processes does
some work where workers share processors."""
MAX_BYTES = 32 * 1024 * 1024
"""The size of all slots together; a container has 64 MB of shared memory by default."""

_COUNTER_BYTES = 128
"""Two cache lines: processors fetch them in pairs."""
_SPIN_S = 0.0001
_MAX_SLEEP_S = 0.001

Array = NDArray[Any]


def is_possible() -> bool:
    """Whether workers on this node can share memory safely; see the head of this file."""
    return FOLDER.is_dir() and platform.machine() in ("x86_64", "AMD64")


def slot_bytes_for(num_workers: int) -> int:
    """The bytes of one worker's slot, which are the most bytes of a chunk, on a node of so many workers."""
    return min(SLOT_BYTES_PER_WORKER * num_workers, MAX_BYTES // (DEPTH * num_workers))


class SharedMemory:
    """Slots that the workers of one node share; lasts as long as one of them has it mapped.

    Collectives have to be called by all workers of the node, in the same order and with values of the same length and
    dtype (anything numpy knows). The first worker of the node is its leader.

    Raises (any collective):
        PeerLost: a worker has ended, or did not come within `timeout_s`; `rank` says which.
    """

    def __init__(self, descriptor: int, node: Sequence[int], rank: int, slot_bytes: int, timeout_s: float) -> None:
        """Map the open file `descriptor`, which belongs to this object from now on; its bytes are zero at first."""
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._node = tuple(node)
        self._me = self._node.index(rank)
        self._others = [worker for worker in range(len(node)) if worker != self._me]
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._next = 0
        self._memory = mmap.mmap(descriptor, _total_bytes(len(node), slot_bytes))
        self._slots_by_dtype: dict[np.dtype[Any], Array] = {}
        counters = memoryview(self._memory)[: _counter_bytes(len(node))].cast("q")
        stride = _COUNTER_BYTES // 8
        self._filled, self._summed, self._done = (
            [counters[at : at + 1] for at in range(kind * stride, len(counters), 3 * stride)] for kind in range(3)
        )

    @staticmethod
    def open(
        group: dist.ProcessGroup, nodes: Sequence[Sequence[int]], timeout_s: float, slot_bytes: int | None = None
    ) -> SharedMemory | None:
        """What this worker shares with the others of its node; None if it is alone there.

        A collective of all workers of the group. The file behind the memory has lost its name when this returns, so
        that nothing is left behind however the workers end.

        Args:
            nodes: the ranks on each node.
            slot_bytes: the most bytes of one chunk, instead of what suits the number of workers.

        Raises:
            LaunchError: a node's /dev/shm is too small or cannot be used; raised on every worker of the group.
        """
        rank = dist.get_rank(group)
        node = next(ranks for ranks in nodes if rank in ranks)
        num_workers = len(node)
        slot_bytes = -(-(slot_bytes or slot_bytes_for(num_workers)) // 64) * 64
        own_path = path = FOLDER / f"paceline-{uuid.uuid4().hex}"
        descriptor = None
        try:
            # The leader makes the file, then the others open it; once all have, nobody needs its name.
            for opens in (rank == node[0], rank != node[0]):
                problem = ""
                if opens and num_workers > 1:
                    new_bytes = _total_bytes(num_workers, slot_bytes) if rank == node[0] else 0
                    try:
                        descriptor = _open(path, node.index(rank), new_bytes)
                    except OSError as error:
                        problem = _problem(error, node, rank, new_bytes)
                path = _agree(path, problem, group)[node[0]]
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        finally:
            own_path.unlink(missing_ok=True)
        return None if descriptor is None else SharedMemory(descriptor, node, rank, slot_bytes, timeout_s)

    @property
    def num_workers(self) -> int:
        return len(self._node)

    def all_reduce(self, values: Tensor) -> None:
        """Sum `values` (1-D, contiguous) over the workers of the node, in place; added in the order of the ranks."""
        if self.num_workers == 2:
            # Two operations a chunk on all of it are faster than three and more on halves; a + b is b + a to the bit.
            self._pipeline(values, self._put, self._add_other)
        else:
            self._pipeline(values, self._put_parts, self._sum_part, self._take_sum)

    def reduce(self, values: Tensor) -> None:
        """Sum values to the leader only; the others' values stay as they are."""
        if self.num_workers == 2:
            self._pipeline(values, *([self._add_other] if self._me == 0 else [self._put, self._leave]))
        else:
            self._pipeline(values, self._put_parts, self._sum_part, self._take_sum if self._me == 0 else self._leave)

    def broadcast(self, values: Tensor) -> None:
        """The leader's values for everybody."""
        self._pipeline(values, *([self._put, self._leave] if self._me == 0 else [self._take_leaders]))

    def _pipeline(self, values: Tensor, *stages: Callable[[int, Array], None]) -> None:
        """Every chunk through every stage; while one chunk is in a stage, the next is in the stage before."""
        array = values.detach().numpy()
        size = self._slot_bytes // array.itemsize
        chunks = [array[start : start + size] for start in range(0, len(array), size)]
        for tick in range(len(chunks) + len(stages) - 1 if chunks else 0):
            for lag, stage in enumerate(stages):
                if 0 <= tick - lag < len(chunks):
                    stage(self._next + tick - lag, chunks[tick - lag])
        self._next += len(chunks)

    # Stages: what a worker does with chunk `number`, here in memory of its own.

    def _put(self, number: int, chunk: Array) -> None:
        self._wait_until_free(number)
        np.copyto(self._slot(number, self._me, chunk), chunk)
        self._filled[self._me][0] = number + 1

    def _add_other(self, number: int, chunk: Array) -> None:
        (other,) = self._others
        self._wait(self._filled, other, number + 1)
        np.add(chunk, self._slot(number, other, chunk), out=chunk)
        self._done[self._me][0] = number + 1

    def _take_leaders(self, number: int, chunk: Array) -> None:
        self._wait(self._filled, 0, number + 1)
        np.copyto(chunk, self._slot(number, 0, chunk))
        self._done[self._me][0] = number + 1

    def _leave(self, number: int, chunk: Array) -> None:  # noqa: ARG002 - it is a stage
        self._done[self._me][0] = number + 1

    def _put_parts(self, number: int, chunk: Array) -> None:
        """What the others will sum; the place of this worker's own part stays free for the sum."""
        self._wait_until_free(number)
        slot = self._slot(number, self._me, chunk)
        for other in self._others:
            part = self._part(other, chunk)
            np.copyto(slot[part], chunk[part])
        self._filled[self._me][0] = number + 1

    def _sum_part(self, number: int, chunk: Array) -> None:
        for other in self._others:
            self._wait(self._filled, other, number + 1)
        part = self._part(self._me, chunk)
        total = self._slot(number, self._me, chunk)[part]
        first, second, *rest = (
            chunk[part] if worker == self._me else self._slot(number, worker, chunk)[part]
            for worker in range(self.num_workers)
        )
        np.add(first, second, out=total)
        for values in rest:
            np.add(total, values, out=total)
        self._summed[self._me][0] = number + 1

    def _take_sum(self, number: int, chunk: Array) -> None:
        for worker in range(self.num_workers):
            self._wait(self._summed, worker, number + 1)
            part = self._part(worker, chunk)
            np.copyto(chunk[part], self._slot(number, worker, chunk)[part])
        self._done[self._me][0] = number + 1

    def _slot(self, number: int, worker: int, chunk: Array) -> Array:
        """A worker's slot for chunk `number`, as long as the chunk is."""
        slots = self._slots_by_dtype.get(chunk.dtype)
        if slots is None:
            slots = np.frombuffer(self._memory, np.uint8, offset=_counter_bytes(self.num_workers)).view(chunk.dtype)
            slots = self._slots_by_dtype[chunk.dtype] = slots.reshape(DEPTH, self.num_workers, -1)
        return slots[number % DEPTH, worker, : len(chunk)]

    def _part(self, worker: int, chunk: Array) -> slice:
        """The part of a chunk that `worker` sums: whole cache lines, and nothing for some where a chunk is short."""
        size = -(-len(chunk) // (16 * self.num_workers)) * 16
        return slice(worker * size, (worker + 1) * size)

    def _wait_until_free(self, number: int) -> None:
        for other in self._others:
            self._wait(self._done, other, number - DEPTH + 1)

    def _wait(self, counters: list[memoryview], worker: int, value: int) -> None:
        """Until a worker's counter has come to `value`.

        At first with the processor but ready to give it away, since two workers may share one; then asleep for an
        eighth of the time waited, so that the main thread computes undisturbed and little time is lost.
        """
        counter = counters[worker]
        if counter[0] >= value:
            return
        began = time.monotonic()
        while counter[0] < value:
            waited_s = time.monotonic() - began
            if waited_s < _SPIN_S:
                os.sched_yield()
                continue
            # In this order: a worker may have done its part and ended since.
            if self._has_ended(worker) and counter[0] < value:
                raise PeerLost(
                    f"Rank {self._node[worker]} ended before it had done its part of an all-reduce with rank "
                    f"{self._node[self._me]} on the same node; look for its own error.",
                    rank=self._node[worker],
                )
            if waited_s > self._timeout_s:
                raise PeerLost(
                    f"Rank {self._node[worker]} did not do its part of an all-reduce with rank "
                    f"{self._node[self._me]} on the same node within {self._timeout_s:g} s; look what it is doing, "
                    "or raise timeout_s if its step takes that long.",
                    rank=self._node[worker],
                )
            time.sleep(min(_MAX_SLEEP_S, waited_s / 8))

    def _has_ended(self, worker: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, worker)
        except OSError:
            return False
        return True


def _counter_bytes(num_workers: int) -> int:
    return -(-3 * _COUNTER_BYTES * num_workers // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(num_workers: int, slot_bytes: int) -> int:
    return _counter_bytes(num_workers) + DEPTH * num_workers * slot_bytes


def _open(path: Path, place: int, new_bytes: int) -> int:
    """Open the node's file and hold the worker's place in it; with `new_bytes`, make the file."""
    flags = os.O_CREAT | os.O_EXCL if new_bytes else 0
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if new_bytes:
            # Not ftruncate: memory that is only promised kills whoever touches it when there is none left.
            os.posix_fallocate(descriptor, 0, new_bytes)
        # The kernel lets go of this lock however the process ends; so the others notice.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _problem(error: OSError, node: Sequence[int], rank: int, new_bytes: int) -> str:
    """A sentence that says why a worker could not open the node's file."""
    if error.errno != errno.ENOSPC:
        return f"Rank {rank} cannot use {FOLDER} to share memory with the workers of its node: {error.strerror}."
    return (
        f"{FOLDER} on the node of rank {rank} has no room for the {-(-new_bytes // 1_000_000)} MB that its {len(node)} "
        f"workers share; make it larger (docker run --shm-size=64m, or mount -o remount,size=64m {FOLDER})."
    )


def _agree(path: Path, problem: str, group: dist.ProcessGroup) -> list[Path]:
    """Every rank's path; a `LaunchError` for all if one has met a problem."""
    answers = all_gather_objects((str(path), problem), group)
    problems = [problem for _, problem in answers if problem]
    if problems:
        raise LaunchError(problems[0])
    return [Path(path) for path, _ in answers]
