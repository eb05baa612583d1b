"""One worker's side of asynchronous training: take a shard, compute, deliver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from paceline.comm.asynchronous.calls import Calls
from paceline.comm.asynchronous.ledger import Ledger, Task
from paceline.comm.asynchronous.server import Answer, Coordinator, ParameterServer, Push, Question, divide
from paceline.errors import JobError, ModelError, PeerLost

ComputeShard = Callable[[int, int], tuple[Tensor, float]]
"""compute(batch, shard): leaves the gradient of the shard's weighted loss in `.grad` of the parameters (None before).
Returns statistics to be added over the shards, a 1-D tensor of one length and dtype for all of them, and the shard's
weight: NaN if no update is to be made by this batch."""


class AsynchronousWorker:
    """One worker's part in asynchronous training, which all workers enter and `close` together."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        num_shards: Callable[[int], int],
        lr_factor: Callable[[int], float] = lambda _batch: 1.0,
        *,
        first_batch: int = 0,
        staleness: int = 1,
        num_servers: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        """A collective of `group`.

        Args:
            optimizer: one of torch.optim over the parameters to train; parameters, rates and state alike on every
                worker. The parameters stay the same objects and get their values from the servers.
            group: all workers, over Gloo; used by nothing else, with a timeout that the run does not reach.
            num_shards: the virtual shards of batch k, counted from the beginning of the run; the same on all workers.
            lr_factor: the factor on the optimizer's learning rates for update k; the same on all workers.
            first_batch: the number of updates that parameters and optimizer have already had.
            staleness: a shard of batch k is computed on the parameters after k - staleness updates, but not from before
                work began.
            num_servers: how many workers also serve: the first ones.
            timeout_s: a server that does not answer for so long is lost; a shard that takes longer is given to another
                worker, too.

        Raises:
            JobError: more servers than workers.
            ModelError: parameters or an optimizer that cannot be divided among servers.
        """
        num_workers, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check(optimizer, self._parameters, num_servers, num_workers)
        self._group, self._staleness, self._timeout_s = group, staleness, timeout_s
        self._seen = first_batch
        self._servers = range(num_servers)
        self._held = divide([p.numel() for p in self._parameters], num_servers)
        handlers: dict[str, Callable[..., Any]] = {}
        on_leave: Callable[[int], None] = lambda _rank: None  # noqa: E731
        if self._rank in self._servers:
            server = ParameterServer(optimizer, self._held[self._rank], num_shards, lr_factor, first_batch)
            handlers |= {"pull": server.pull, "push": server.push, "state": server.state}
        if self._rank == 0:
            coordinator = Coordinator(Ledger(num_shards, staleness, timeout_s, first_batch), num_shards, num_workers)

            def push_last(push: Push, statistics: Tensor) -> None:
                server.push(push)
                coordinator.arrive(push.task, statistics)

            handlers |= {"ask": coordinator.ask, "push_last": push_last}
            on_leave = coordinator.leave
        self._calls = Calls(group, timeout_s, handlers, on_leave, (Answer, Push, Question, Task))
        self._delivery = ThreadPoolExecutor(1, "paceline-delivery")

    def work(
        self,
        compute: ComputeShard,
        until: int,
        wants_pause: Callable[[], bool] = lambda: False,
        *,
        is_weighted: bool = False,
    ) -> Iterator[tuple[int, Tensor]]:
        """Compute shards until `until` updates have been made in all, or until a worker asks for a pause.

        A gradient is sent while the next shard is computed; parameters are fetched once for all shards of a batch.
        Raises `PeerLost` where a server is lost, or a worker was when the work is done; says which.

        Args:
            wants_pause: called between two shards; if it is True on any worker, all stop as soon as the batches that
                are begun are finished, at least one of them.
            is_weighted: whether the sum of a batch's gradients is divided by that of its weights before the update.

        Yields, on every worker, for every batch in order as it is finished, its number and the sum of its statistics.
        The iterator must be exhausted: at its end all workers wait for one another, and each has the parameters after
        the same number of updates.
        """
        first, version = self._seen, -1
        computed: tuple[list[Push], Tensor] | None = None
        sending: Future[None] | None = None
        while True:
            if sending is not None:
                sending.result()
            question = Question(self._rank, until, self._seen, computed is None, wants_pause())
            answer: Answer = self._calls.call(0, "ask", question)
            task = answer.task
            if answer.is_last or task is not None:
                wanted = answer.until if task is None else max(first, task.batch - self._staleness)
                if wanted != version and not self._pull(wanted):
                    task = None  # others have computed it since
                else:
                    version = wanted
            if computed is not None:
                sending, computed = self._delivery.submit(self._deliver, *computed), None
            for statistics in answer.statistics:
                self._seen += 1
                yield self._seen - 1, statistics
            if answer.is_last:
                break
            if task is not None:
                for parameter in self._parameters:
                    parameter.grad = None
                statistics, weight = compute(task.batch, task.shard)
                oldest = max(first, answer.finished - self._staleness)
                pushes = self._pushes(task, version, oldest, weight, is_weighted=is_weighted)
                computed = pushes, statistics.detach().cpu()
        if sending is not None:
            sending.result()
        if answer.lost is not None:
            raise PeerLost(f"Worker {answer.lost} was lost; start again from the last checkpoint.", rank=answer.lost)
        self._wait_for_all()

    def collect(self) -> None:
        """Bring the optimizer's whole state to every worker: with the parameters, what one worker alone would have now.

        A collective between two calls of `work`. To continue from it, on any number of servers, open with that
        optimizer on every worker, and the number of updates made as `first_batch`.
        """
        states = itertools.chain(*self._calls.call_each(dict.fromkeys(self._servers, ("state",))))
        for parameter, state in zip(self._parameters, states, strict=True):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                    value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                self._optimizer.state[parameter][name] = value
        self._wait_for_all()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the servers: together with all workers, or without them if an error ends the run."""
        if error is None:
            self._wait_for_all()
        self._delivery.shutdown()
        # After the loss of a worker the others are still told which.
        self._calls.close(self._servers, is_abandoned=not isinstance(error, PeerLost | None))

    def _wait_for_all(self) -> None:
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerLost(
                f"A worker did not come within {self._timeout_s:g} s to where the others wait for it; look at "
                f"what it does, or give it more time (timeout_s). ({error})"
            ) from error

    def _pull(self, version: int) -> bool:
        """Put the values after so many updates into the parameters; False: nobody needs them any more."""
        parts = self._calls.call_each(dict.fromkeys(self._servers, ("pull", version)))
        if any(part is None for part in parts):
            return False
        values = torch.cat(parts).split([p.numel() for p in self._parameters])
        with torch.no_grad():
            for parameter, part in zip(self._parameters, values, strict=True):
                parameter.copy_(part.view(parameter.shape))
        return True

    def _pushes(self, task: Task, version: int, oldest: int, weight: float, *, is_weighted: bool) -> list[Push]:
        """The gradient that is in `.grad` of the parameters, for each server."""
        unused = tuple(number for number, p in enumerate(self._parameters) if p.grad is None)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return [
            Push(task, version, oldest, torch.cat([g.flatten() for g in mine]).cpu(), unused, weight, is_weighted)
            for held in self._held
            for mine in [[*gradients[held.start : held.stop], gradients[0][:0]]]
        ]

    def _deliver(self, pushes: list[Push], statistics: Tensor) -> None:
        """Send every server its part of a gradient; the first one last, which then counts the shard as arrived."""
        self._calls.call_each({rank: ("push", push) for rank, push in enumerate(pushes) if rank})
        self._calls.call(0, "push_last", pushes[0], statistics)


def _check(optimizer: Optimizer, parameters: list[Tensor], num_servers: int, num_workers: int) -> None:
    if not 1 <= num_servers <= num_workers:
        raise JobError(f"num_servers = {num_servers} should be between 1 and {num_workers}, the workers.")
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, LBFGS):
        raise ModelError(
            f"Asynchronous servers need an optimizer of torch.optim other than LBFGS, not {type(optimizer).__name__}."
        )
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) != 1:
        raise ModelError(
            f"Asynchronous servers need trainable parameters of one dtype, not {' and '.join(dtypes) or 'none'}; "
            "convert the model to one."
        )
