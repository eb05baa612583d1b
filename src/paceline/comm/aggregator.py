"""Summing gradients over all workers: an algorithm and a wire format, behind one queue of collectives.

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
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.links import Links
from paceline.comm.parameter_server import sum_at_servers
from paceline.errors import DivergenceError
from paceline.heartbeat import inside
from paceline.object_collectives import all_gather_objects
from paceline.words import and_more

Algorithm = Callable[[Tensor, Links], None]
"""Sums a vector (1-D, contiguous, float32 or float64) over all workers, in place; called by all of them alike."""

CLOSE_S = 1.0

CHECKED_STEPS = 3
"""Steps whose calls are compared across workers in any case: gradients settle in buckets within the first two."""


def all_reduce(values: Tensor, links: Links) -> None:
    """The backend's own: one call, the reference that the other algorithms are tested against.

    The backend adds in the format that it is given. So values in a lossy format go by a reduce-scatter and an
    all-gather of direct messages, which add in the dtype of the values.
    """
    if links.wire is None:
        links.all_reduce(values)
    else:
        sum_at_servers(values, links, workers=links.ring, servers=links.ring)


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
    sum_up: Callable[[Tensor], None]
    done: torch.futures.Future[Tensor]


class Aggregator:
    """How the workers of one group add up: every sum is begun at once and done in the background, in order.

    Sums may only be begun by one thread, in the same order on every worker. `wait` on a future returned here, then
    `raise_error`, before anything else uses the group.
    """

    def __init__(self, algorithm: Algorithm, links: Links, *, check_always: bool = False) -> None:
        """`check_always`: whether the calls of all steps are compared across workers."""
        self.links = links
        self._algorithm = algorithm
        self._check_always = check_always
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._step = self._num_steps = 0
        self._sequence = 0
        self._stream = torch.cuda.Stream(links.device) if links.device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        if self._stream is None:
            # A daemon: a collective that waits for a dead peer must not keep this process alive.
            self._thread = threading.Thread(target=self._run, name="paceline-communication", daemon=True)
            self._thread.start()

    def begin_step(self, number: int) -> None:
        """Begin the step of the run with this number, to which sums that are begun from now on belong."""
        self._step, self._num_steps = number, self._num_steps + 1

    def sum_bucket(self, values: Tensor, names: Sequence[str]) -> torch.futures.Future[Tensor]:
        """Begin to replace some parameters' gradients, as one flat vector, by their sum, in the run's wire format;
        `names` are those of the parameters."""

        def sum_in_float(values: Tensor) -> None:
            wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
            self._algorithm(wide, self.links)
            if wide is not values:  # rounded once, at the end
                values.copy_(wide)

        return self._begin("gradients", " … ".join(dict.fromkeys((names[0], names[-1]))), values, sum_in_float)

    def sum_exactly(self, values: Tensor, name: str) -> torch.futures.Future[Tensor]:
        """Begin to sum a few numbers that no run may lose, 1-D: losses, statistics, counts."""
        links = replace(self.links, wire=None)
        return self._begin("numbers", name, values, lambda values: all_reduce(values, links))

    def _begin(
        self, operation: str, name: str, values: Tensor, sum_up: Callable[[Tensor], None]
    ) -> torch.futures.Future[Tensor]:
        """Returns a future of `values`, which is fulfilled after an error too: see `raise_error`."""
        self._sequence += 1
        call = CollectiveCall(self._sequence, self._step, operation, name, str(values.dtype), tuple(values.shape))
        if self._stream is None:
            task = _Task(call, values, sum_up, torch.futures.Future())
            self._tasks.put(task)
            return task.done
        task = _Task(call, values, sum_up, torch.futures.Future(devices=[self.links.device]))
        self._stream.wait_stream(torch.cuda.current_stream(self.links.device))
        with torch.cuda.stream(self._stream):
            self._do(task)
        return task.done

    def raise_error(self) -> None:
        """Raise the first error of a sum, if any; the group cannot be used after it."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after all sums; the wait for it is short, because a peer may be dead.

        There is a wait because an interpreter that ends under a running thread may abort the process.
        """
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)
            del task  # or its values would stay in memory until there is another one

    def _do(self, task: _Task) -> None:
        if self._error is None:
            try:
                with inside(str(task.call)):
                    if self._check_always or self._num_steps <= CHECKED_STEPS:
                        check_agreement(task.call, self.links)
                    task.sum_up(task.values)
            except BaseException as error:
                self._error = error
        task.done.set_result(task.values)


# --- whether all workers call the same. Unchecked, a mix-up of calls with equal shapes gives a silently wrong result,
# and one with different shapes ends the process without a Python error ---


def check_agreement(call: CollectiveCall, links: Links) -> None:
    """Compare `call` with what the other workers are about to do; one small all-gather. Raises `DivergenceError` on
    every worker, naming the ranks that differ, the tensor and the step."""
    mine = torch.tensor(call.fingerprint(), device=links.device)
    gathered = [torch.empty_like(mine) for _ in range(links.world_size)]
    dist.all_gather(gathered, mine, group=links.group)
    if all(torch.equal(theirs, mine) for theirs in gathered):
        return
    raise DivergenceError(describe_divergence(all_gather_objects(call, links.group, [CollectiveCall])))


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
