"""Issues all collectives of a group, in the order in which they were submitted.

A backend pairs the calls of different workers by their order. Issued from callbacks or from several threads the order
is left to chance, and workers wait for each other for ever; issued from one queue it is the order of the program.

Collectives of host memory keep the thread that calls them busy, so they have one of their own. Those of GPUs are only
enqueued, on a stream of their own, by the thread that submits them: so all communicators of a worker are called in the
order of the program, the same one on every worker; a GPU may have no room for the kernels of all of them at once.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DivergenceError
from paceline.heartbeat import inside
from paceline.object_collectives import all_gather_objects
from paceline.words import and_more

CLOSE_S = 1.0

CHECKED_STEPS = 3
"""Steps whose calls are compared across workers in any case: DDP settles its buckets within the first two."""


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that one worker is about to call."""

    sequence: int
    step: int
    operation: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"call {self.sequence} in step {self.step}: {self.operation} of {self.name} ({shape} {self.dtype})"

    def fingerprint(self) -> list[int]:
        """Whole numbers, equal for equal calls and always as many."""
        text = f"{self.operation}|{self.name}|{self.dtype}|{self.shape}"
        return [self.sequence, self.step, zlib.crc32(text.encode())]


@dataclass(frozen=True)
class _Task:
    call: CollectiveCall
    values: Tensor
    work: Callable[[], None]
    done: torch.futures.Future[Tensor]
    ready: torch.cuda.Event | None
    is_checked: bool


def blocks_caller(device: torch.device) -> bool:
    """Whether a collective of tensors on `device` keeps the thread that calls it busy until it is over."""
    return device.type != "cuda"


class Scheduler:
    """Runs what is submitted, one after the other, while the submitting thread goes on.

    Work may only be submitted by one thread, in the same order on every worker. `wait` on a future returned here, then
    `raise_error`, before anything else uses the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, check_always: bool = False) -> None:
        self._group = group
        self._device = device
        self._check_always = check_always
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.Queue[_Task | None] = queue.Queue()
        self._error: BaseException | None = None
        self._step = 0
        self._sequence = 0
        self._thread: threading.Thread | None = None
        if blocks_caller(device):
            # A daemon: a collective that waits for a dead peer must not keep this process alive.
            self._thread = threading.Thread(target=self._run, name="paceline-communication", daemon=True)
            self._thread.start()

    def begin_step(self) -> None:
        """Begin the next training step, to which work submitted from now on belongs."""
        self._step += 1

    def submit(
        self, operation: str, name: str, values: Tensor, work: Callable[[], None]
    ) -> torch.futures.Future[Tensor]:
        """Have `work` change `values` in place, on the communication thread or stream.

        Args:
            operation, name: what is done to what, for the comparison across workers.

        Returns:
            A future of `values`. It is fulfilled after an error too, because DDP cannot pass one on: see `raise_error`.
        """
        self._sequence += 1
        call = CollectiveCall(self._sequence, self._step, operation, name, str(values.dtype), tuple(values.shape))
        on_cuda = self._stream is not None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device] if on_cuda else None)
        ready = torch.cuda.current_stream(self._device).record_event() if on_cuda else None
        is_checked = self._check_always or self._step <= CHECKED_STEPS
        task = _Task(call, values, work, done, ready, is_checked)
        if self._thread is None:
            with self._on_stream():
                self._finish(task)
        else:
            self._tasks.put(task)
        return done

    def raise_error(self) -> None:
        """Raise the first error of submitted work, if any; the group cannot be used after it."""
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Wait until the communication thread holds no reference to submitted work any more.

        The work's future is fulfilled a little earlier.
        """
        self._tasks.join()

    def close(self) -> None:
        """End the thread after the submitted work; the wait for it is short, because a peer may be dead.

        There is a wait because an interpreter that ends under a running thread may abort the process.
        """
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._finish(task)
            del task  # or its values would stay in memory until there is another one
            self._tasks.task_done()

    def _finish(self, task: _Task) -> None:
        if self._error is None:
            try:
                self._do(task)
            except BaseException as error:
                self._error = error
        task.done.set_result(task.values)

    def _do(self, task: _Task) -> None:
        if self._stream is not None and task.ready is not None:
            self._stream.wait_event(task.ready)
        with inside(str(task.call)):
            if task.is_checked:
                check_agreement(task.call, self._group, self._device)
            task.work()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


# --- whether all workers call the same. Unchecked, a mix-up of calls with equal shapes gives a silently wrong result,
# and one with different shapes ends the process without a Python error ---


def check_agreement(call: CollectiveCall, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare `call` with what the other workers are about to do; one small all-gather.

    Raises:
        DivergenceError: on every worker, naming the ranks that differ, the tensor and the step.
    """
    mine = torch.tensor(call.fingerprint(), device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    if all(torch.equal(theirs, mine) for theirs in gathered):
        return
    raise DivergenceError(describe_divergence(all_gather_objects(call, group, [CollectiveCall])))


def describe_divergence(calls: Sequence[CollectiveCall]) -> str:
    """One sentence that names the ranks whose call differs from the most common one (in a tie, from rank 0's)."""
    counts = Counter(calls)
    common = max(counts, key=lambda call: (counts[call], call == calls[0]))
    differing = [rank for rank, call in enumerate(calls) if call != common]
    others = " and ".join(f"rank {rank} is at {calls[rank]}" for rank in differing[:4])
    more = and_more(len(differing) - 4)
    return (
        f"The workers are no longer doing the same: {others}{more}, while the other {counts[common]} are at {common}; "
        "look for code that depends on the rank, or on data of its own, before that step."
    )
