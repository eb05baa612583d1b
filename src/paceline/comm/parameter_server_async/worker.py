"""One worker's side of `parameter_server_async`: take a shard, compute, deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from paceline.comm.parameter_server_async.coordinator import Coordinator
from paceline.comm.parameter_server_async.exchange import Exchange
from paceline.comm.parameter_server_async.ledger import Ledger
from paceline.comm.parameter_server_async.messages import MESSAGES, NextWork, ParameterRange, Task
from paceline.comm.parameter_server_async.node import NodeWorkers, ShardResult, ShardSums
from paceline.comm.parameter_server_async.peers import Peers
from paceline.comm.parameter_server_async.server import ParameterSlice, is_element_wise, spans
from paceline.errors import JobError, ModelError, PeerLost

_ELEMENT_WISE = (SGD, Adam, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD)

ShardGradient = Callable[[int, int], Tensor]
"""compute(batch, shard): leaves the gradient of the shard's weighted loss in `.grad` of the parameters (None before)
and returns statistics to be added over the shards: a 1-D tensor, of one length and dtype for all of them."""


@dataclass(frozen=True)
class UpdateSchedule:
    """The batches and learning rates of all updates; the same on every worker."""

    num_shards: Callable[[int], int]
    """Virtual shards of batch k, counted from the beginning of the run."""
    lr_factor: Callable[[int], float] = lambda _batch: 1.0
    """The factor on the optimizer's learning rates for update k."""
    first_batch: int = 0
    """The number of updates that parameters and optimizer have already had."""


@dataclass(frozen=True)
class ServerSettings:
    """Staleness, number of servers and time limits."""

    staleness: int = 1
    """A shard of batch k is computed on the parameters after k - staleness updates, but not from before work began."""
    num_servers: int = 1
    """The number of workers (or nodes, where a node acts as one) that also serve: the first ones."""
    timeout_s: float = 60.0
    """A worker that does not answer for so long is lost, and a shard that takes longer is given to another one too."""


class ParameterServerAsync:
    """One worker's part in asynchronous training; a context manager that all workers enter together.

    Args:
        optimizer: element-wise, over the parameters to train; parameters, rates and state alike on every worker. The
            parameters stay the same objects and get their values from the servers.
        store: one that all workers share, such as the process group's.
        rank: this worker's rank.
        nodes: which ranks act as one worker: ((0,), (1,), …) where each stands for itself.
        node_group: this worker's node as a process group, where it has more than one worker.

    Raises:
        JobError: more servers than workers (or nodes) that could serve.
        ModelError: parameters or an optimizer that cannot be cut into slices.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        course: UpdateSchedule,
        terms: ServerSettings,
        *,
        store: Store,
        rank: int,
        nodes: Sequence[Sequence[int]],
        node_group: dist.ProcessGroup | None = None,
    ) -> None:
        leaders = [node[0] for node in nodes]
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check(optimizer, self._parameters, terms, len(leaders))
        self._terms = terms
        self._rank = rank
        self._node = NodeWorkers(next(node for node in nodes if rank in node), rank, node_group)
        self._servers = leaders[: terms.num_servers]
        self._spans = spans(sum(p.numel() for p in self._parameters), terms.num_servers)
        self._version: int | None = None
        self._num_barriers = 0
        self._coordinator: Coordinator | None = None
        self._peers: Peers | None = None
        self._exchange: Exchange | None = None
        """On the leader of a node."""
        if not self._node.leads:
            return
        handlers: dict[str, Callable[..., Any]] = {"is_there": lambda: True}
        if rank in self._servers:
            span = self._spans[self._servers.index(rank)]
            held = ParameterSlice(optimizer, span, course.num_shards, course.lr_factor, course.first_batch)
            handlers |= {"pull": held.pull, "push": held.push, "state": held.state}
        if rank == leaders[0]:
            ledger = Ledger(course.num_shards, terms.staleness, terms.timeout_s, course.first_batch)
            self._coordinator = Coordinator(ledger, course.num_shards, leaders, self._servers)
            one = self._coordinator
            handlers |= {"ask": one.ask, "barrier": one.barrier, "leave": one.leave}
        self._peers = Peers(store, rank, leaders, terms.timeout_s, handlers, MESSAGES)
        self._exchange = Exchange(
            self._peers,
            rank,
            self._servers,
            self._spans,
            staleness=terms.staleness,
            most=len(self._node.ranks),
            first_batch=course.first_batch,
        )
        if self._coordinator is not None:
            self._coordinator.start(self._peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._node.leads:
            if self._coordinator is not None and isinstance(error, PeerLost) and error.rank is not None:
                # The others should be told which worker was lost, and not take this one for it.
                self._coordinator.leave(error.rank)
                self._coordinator.wait_until_alone(self._terms.timeout_s)
            self._leave()

    def work(
        self,
        compute: ShardGradient,
        until: int,
        wants_pause: Callable[[], bool] = lambda: False,
        weight_at: int | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Compute shards until `until` updates have been made in all, or until a worker asks for a pause.

        Args:
            wants_pause: called between two shards, on workers that lead their nodes; if it is True on any, all stop as
                soon as the batches that are begun are finished, at least one of them.
            weight_at: the index of a shard's weight in its statistics: the sum of gradients is divided by the sum of
                weights before the update. None: it is not divided.

        Yields, on every worker, for every batch in order as it is finished, its number and the sum of its statistics.
        The iterator must be exhausted: at its end all workers wait for one another, and each has the parameters after
        the same number of updates.

        Raises:
            PeerLost: a server is lost (says which), or this worker was given up by the others.
        """
        self._version = None
        if self._exchange is not None:
            self._exchange.begin(until, weight_at)
        while True:
            next_work, values = self._next(wants_pause)
            self._take(next_work.version, values)
            yield from next_work.statistics
            if next_work.is_last:
                break
            if next_work.task is not None:
                self._do(next_work.task, compute, wants_pause)
        self.barrier()

    def barrier(self) -> None:
        """Wait for all remaining workers.

        Raises:
            PeerLost: some did not come within the timeout; says which.
        """
        self._num_barriers += 1
        give_up_at_s = time.monotonic() + self._terms.timeout_s
        while self._node.on_leader(partial(self._ask_who_is_missing, self._num_barriers, give_up_at_s)):
            pass

    def collect(self) -> None:
        """Bring the optimizer's whole state to every worker: with the parameters, what one worker alone would have now.

        A collective between two calls of `work`. To continue from it, on any number of servers, open with that
        optimizer on every worker, and the number of updates made as `UpdateSchedule.first_batch`.
        """
        for parts in self._node.on_leader(lambda: self._own_exchange.ask_servers("state")):
            for piece, values in parts:
                self._put_back(piece, values)
        self.barrier()

    def close(self) -> None:
        """Leave together with all remaining workers. A collective."""
        self.barrier()
        if self._node.leads:
            if self._coordinator is not None:
                # Other workers may not have been told yet that all have arrived at the barrier.
                self._coordinator.wait_until_alone(self._terms.timeout_s)
            self._leave()

    def _put_back(self, piece: ParameterRange, values: Mapping[str, Any]) -> None:
        """Write a piece of a parameter's optimizer state into the whole; its first piece comes first."""
        parameter = self._parameters[piece.parameter]
        like = parameter.new_empty(piece.stop - piece.start)
        for name, value in values.items():
            whole = self._optimizer.state[parameter]
            if is_element_wise(name, value, like):
                if piece.start == 0:
                    whole[name] = torch.empty_like(parameter, dtype=value.dtype)
                flat = whole[name].flatten().clone()  # it may be the same memory in another order of dimensions
                flat[piece.start : piece.stop] = value
                whole[name].copy_(flat.view(parameter.shape))
            else:
                whole[name] = value

    def _leave(self) -> None:
        """Leave without waiting; the other workers will not wait for this one."""
        assert self._peers is not None
        if self._coordinator is not None:
            self._coordinator.stop()
        else:
            with suppress(PeerLost):
                self._own_exchange.ask_coordinator("leave", self._rank)
        self._peers.close()
        self._own_exchange.close()

    @property
    def _own_exchange(self) -> Exchange:
        assert self._exchange is not None  # this is a leader
        return self._exchange

    def _take(self, version: int | None, values: Tensor | None) -> None:
        """Put the values after so many updates into the parameters: on the leader they are there already."""
        if version == self._version:
            return
        if values is None:
            values = self._parameters[0].new_empty(self._spans[-1][1], device="cpu")
        self._node.share(values)
        with torch.no_grad():
            parts = values.split([p.numel() for p in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))
        self._version = version

    def _next(self, wants_pause: Callable[[], bool]) -> tuple[NextWork, Tensor | None]:
        """The next work for all workers of the node; parameters for its leader only."""
        values: Tensor | None = None

        def fetch() -> NextWork:
            nonlocal values
            fetched = self._own_exchange.next(wants_pause())
            values = fetched.values
            return fetched.next_work

        return self._node.on_leader(fetch), values

    def _do(self, task: Task, compute: ShardGradient, wants_pause: Callable[[], bool]) -> None:
        """Compute a task, and begin to deliver it."""
        if self._exchange is None:
            self._compute(task, compute)
            return
        with self._exchange.computing():
            sums = self._compute(task, compute)
        assert sums is not None and self._version is not None
        self._exchange.deliver(task, self._version, sums, wants_pause())

    def _compute(self, task: Task, compute: ShardGradient) -> ShardSums | None:
        """This worker's shard of `task`, added to those of its node; the sums on its leader."""
        mine = None
        shard = task.start + self._node.ranks.index(self._rank)
        if shard < task.stop:
            for parameter in self._parameters:
                parameter.grad = None
            statistics = compute(task.batch, shard)
            used = torch.tensor([p.grad is not None for p in self._parameters])
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            gradient = torch.cat([g.detach().flatten() for g in gradients]).cpu()
            mine = ShardResult(gradient, used, statistics.detach().cpu())
        return self._node.add(task.start, mine)

    def _ask_who_is_missing(self, number: int, give_up_at_s: float) -> bool:
        """Whether barrier `number` still waits for some worker."""
        missing = cast("frozenset[int]", self._own_exchange.ask_coordinator("barrier", self._rank, number))
        if missing and time.monotonic() > give_up_at_s:
            first = min(missing)
            raise PeerLost(
                f"Worker {first} did not come within {self._terms.timeout_s:g} s to where the others wait for it; "
                "look at what it does, or give it more time (timeout_s).",
                rank=first,
            )
        return bool(missing)


def _check(optimizer: Optimizer, parameters: Sequence[Tensor], terms: ServerSettings, num_leaders: int) -> None:
    if not 1 <= terms.num_servers <= num_leaders:
        raise JobError(
            f"num_servers = {terms.num_servers} should be between 1 and {num_leaders}, the workers or nodes."
        )
    if not isinstance(optimizer, _ELEMENT_WISE):
        raise ModelError(
            f"parameter_server_async cuts parameters among servers, but {type(optimizer).__name__} may need "
            f"them whole; use one of {', '.join(kind.__name__ for kind in _ELEMENT_WISE)}."
        )
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) != 1:
        raise ModelError(
            "parameter_server_async needs trainable parameters of one dtype, but the optimizer has "
            f"{' and '.join(dtypes) or 'none'}; convert the model to one."
        )
