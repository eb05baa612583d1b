"""The servers of asynchronous training: parameters with their optimizer, and who computes which shard.

A server lives in a worker's process, and answers calls in threads beside that worker's own training: operations on
tensors release Python's lock.
"""

from __future__ import annotations

import copy
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.asynchronous.ledger import Ledger, ShardSum, Task

POLL_S = 0.5
"""How long a question waits at the coordinator before the answer is that there is nothing to do yet."""


def divide(sizes: Sequence[int], num_servers: int) -> list[range]:
    """The numbers of the parameters that each server holds: neighbours, with about as many elements for each server.
    `sizes`: the number of elements of each parameter."""
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    twice_the_middle = 2 * ends - torch.tensor(sizes, dtype=torch.int64)
    server_of = (twice_the_middle * num_servers // (2 * ends[-1]).clamp(min=1)).tolist()
    return [range(bisect_left(server_of, one), bisect_right(server_of, one)) for one in range(num_servers)]


def late_momentum(momentum: float, lateness: int) -> float:
    """The momentum for an update by gradients that are `lateness` updates late.

    Late gradients act like momentum themselves (Mitliagkas et al., "Asynchrony begets momentum", 2016). A momentum m
    spreads a gradient over m / (1 - m) updates after the first one; this one spreads it over 1 + `lateness` times
    fewer. The learning rate stays: where it is stable, a smaller one only learns more slowly.
    """
    return momentum if lateness == 0 else momentum / (momentum + (1 - momentum) * (1 + lateness))


@dataclass(frozen=True)
class Push:
    """The gradient of a shard, for one server."""

    task: Task
    version: int
    """The number of updates that the parameters had when it was computed."""
    oldest: int
    """Nobody needs the parameters of fewer updates any more."""
    gradient: Tensor
    """The gradients of this server's parameters, flattened, one after the other; zero where there is none."""
    unused: tuple[int, ...]
    """The numbers, among all parameters, of those that have no gradient at all."""
    weight: float
    """The shard's weight in the mean over its batch; NaN: no update is made by this batch."""
    is_weighted: bool
    """Whether the sum of the batch's gradients is divided by that of its weights."""


class _Batch:
    """The gradients of a batch, as far as they have arrived."""

    def __init__(self, num_shards: int, first: Push) -> None:
        self.gradient, self.weight = ShardSum(num_shards), ShardSum(num_shards)
        self.unused = set(first.unused)
        """The parameters to which no shard gave a gradient."""
        self.lateness = first.task.batch - first.version
        self.is_weighted = first.is_weighted

    def add(self, push: Push) -> None:
        dtype = torch.float64 if push.gradient.dtype == torch.float64 else torch.float32
        self.gradient.add(push.task.shard, push.gradient)
        self.weight.add(push.task.shard, torch.tensor([push.weight], dtype=dtype))
        self.unused &= set(push.unused)


class ParameterServer:
    """Some of the parameters, and the optimizer that updates them: batch after batch, in order."""

    def __init__(
        self,
        optimizer: Optimizer,
        numbers: range,
        num_shards: Callable[[int], int],
        lr_factor: Callable[[int], float],
        first_batch: int,
    ) -> None:
        """
        Args:
            optimizer: that of all parameters; its present state is where this server's begins.
            numbers: those of this server's parameters.
        """
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        self._numbers = numbers
        mine = [originals[number] for number in numbers]
        self._values = torch.cat([originals[0].detach().new_empty(0), *(p.detach().flatten() for p in mine)]).cpu()
        self._sizes = [p.numel() for p in mine]
        parts = self._values.split(self._sizes) if mine else ()
        self._parameters = [nn.Parameter(part.view(p.shape)) for part, p in zip(parts, mine, strict=True)]
        self._optimizer = _optimizer_of(optimizer, dict(zip(mine, self._parameters, strict=True)))
        self._base_groups = [dict(group) for group in self._optimizer.param_groups]
        self._num_shards = num_shards
        self._lr_factor = lr_factor
        self._lock = threading.Lock()
        self._version = first_batch
        self._batches: dict[int, _Batch] = {}
        # Never written to once they are here: an answer may be on its way while the next update is made.
        self._snapshots = {first_batch: self._values.clone()}

    def pull(self, version: int) -> Tensor | None:
        """The values after so many updates, flattened, one after the other. None: nobody needs them any more."""
        return self._snapshots.get(version)

    def push(self, push: Push) -> None:
        """Count the gradient of a shard; update once all of its batch are there."""
        with self._lock:
            self._snapshots = {number: kept for number, kept in self._snapshots.items() if number >= push.oldest}
            batch = push.task.batch
            if batch < self._version:
                return  # another worker has computed it, too
            if batch not in self._batches:
                self._batches[batch] = _Batch(self._num_shards(batch), push)
            self._batches[batch].add(push)
            while self._version in self._batches and self._batches[self._version].gradient.is_complete:
                self._update(self._batches.pop(self._version))

    def _update(self, batch: _Batch) -> None:
        gradient, weight = batch.gradient.total(), batch.weight.total()
        if weight > 0:  # else nothing counts, or a number is not finite
            if batch.is_weighted:
                gradient.mul_(weight.reciprocal())
            parts = gradient.split(self._sizes) if self._sizes else ()
            for number, parameter, part in zip(self._numbers, self._parameters, parts, strict=True):
                # None as in plain torch where nobody used it: an optimizer would decay even what has gradient zero.
                parameter.grad = None if number in batch.unused else part.view(parameter.shape)
            for group, base in zip(self._optimizer.param_groups, self._base_groups, strict=True):
                group["lr"] = float(base["lr"]) * self._lr_factor(self._version)
                if base.get("momentum"):
                    group["momentum"] = late_momentum(base["momentum"], batch.lateness)
            self._optimizer.step()
        self._version += 1
        self._snapshots = self._snapshots | {self._version: self._values.clone()}

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of each of this server's parameters."""
        with self._lock:
            return [copy.deepcopy(self._optimizer.state.get(parameter, {})) for parameter in self._parameters]


def _optimizer_of(whole: Optimizer, copies: dict[Tensor, nn.Parameter]) -> Optimizer:
    """An optimizer like `whole`, state included, over copies of some of its parameters in host memory."""
    optimizer = copy.copy(whole)
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [
        {name: value for name, value in group.items() if name != "param_names"}
        | {"params": [copies[p] for p in group["params"] if p in copies]}
        for group in whole.param_groups
    ]
    for original, parameter in copies.items():
        for name, value in whole.state.get(original, {}).items():
            is_tensor = isinstance(value, Tensor)
            held = value.detach().cpu().clone(memory_format=torch.contiguous_format) if is_tensor else value
            optimizer.state[parameter][name] = copy.deepcopy(held)
    return optimizer


@dataclass(frozen=True)
class Question:
    """A worker asks the coordinator for work."""

    rank: int
    until: int
    """It wants shards of batches before this one."""
    seen: int
    """It has the statistics of all batches before this one."""
    may_wait: bool
    """Whether it has nothing else to do: the answer may take a moment."""
    wants_pause: bool
    """Whether all workers should stop as soon as the batches that are begun are finished."""


@dataclass(frozen=True)
class Answer:
    """The coordinator's answer. With neither a task nor the end of the batches, the worker asks again."""

    finished: int
    """All batches before this one are in the parameters, on every server."""
    until: int
    """All workers pause when all batches before this one are finished."""
    statistics: tuple[Tensor, ...]
    """The sums over the shards of every batch that is finished and that the worker has not seen."""
    task: Task | None
    lost: int | None
    """A worker that is lost."""

    @property
    def is_last(self) -> bool:
        """Whether there is no more work before the pause."""
        return self.finished >= self.until


class Coordinator:
    """Gives out shards, adds up their statistics, and hears of lost workers: on the first server."""

    def __init__(self, ledger: Ledger, num_shards: Callable[[int], int], num_workers: int) -> None:
        self._ledger = ledger
        self._num_shards = num_shards
        self._changed = threading.Condition()
        self._seen = dict.fromkeys(range(num_workers), ledger.finished)
        """The `Question.seen` of each worker that is there."""
        self._lost: int | None = None
        self._sums: dict[int, ShardSum] = {}
        self._statistics: dict[int, Tensor] = {}
        self._pause_at: int | None = None

    def ask(self, question: Question) -> Answer:
        """Find the worker something to do."""
        with self._changed:
            if self._pause_at is not None and question.seen >= self._pause_at:
                self._pause_at = None  # all have paused and go on
            if question.wants_pause and self._pause_at is None:
                # At least one batch is finished before a pause.
                self._pause_at = max(self._ledger.next_batch, question.seen + 1)
            self._seen[question.rank] = question.seen
            self._statistics = {n: total for n, total in self._statistics.items() if n >= min(self._seen.values())}
            give_up_at_s = time.monotonic() + POLL_S * question.may_wait
            while (answer := self._answer(question)).task is None and not answer.is_last:
                if not self._changed.wait(max(0.0, give_up_at_s - time.monotonic())):
                    break
            return answer

    def _answer(self, question: Question) -> Answer:
        until = question.until if self._pause_at is None else min(question.until, self._pause_at)
        task = self._ledger.take(question.rank, until, time.monotonic())
        finished = min(self._ledger.finished, until)
        statistics = tuple(self._statistics[batch] for batch in range(question.seen, finished))
        return Answer(finished, until, statistics, task, self._lost)

    def arrive(self, task: Task, statistics: Tensor) -> None:
        """A shard has come to every server."""
        with self._changed:
            first = self._ledger.finished
            if task.batch >= first:
                self._sums.setdefault(task.batch, ShardSum(self._num_shards(task.batch))).add(task.shard, statistics)
            self._ledger.arrive(task)
            for batch in range(first, self._ledger.finished):
                self._statistics[batch] = self._sums.pop(batch).total()
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """`rank` is lost, or its run is over: it will not be waited for."""
        with self._changed:
            self._seen.pop(rank, None)
            self._lost = rank if self._lost is None else self._lost
            self._ledger.give_back(rank)
            self._changed.notify_all()
