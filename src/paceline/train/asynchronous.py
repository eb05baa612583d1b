"""Training with `parameter_server_async`: the shards of every global batch, in whatever order workers take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.parameter_server_async import Course
from paceline.data.order import EpochOrder, epoch_order
from paceline.errors import JobError
from paceline.parallel import Assignment, AsyncServers, StepInput, open_servers
from paceline.parallel.assignment import shard_sizes
from paceline.train.run import LossFn, Run
from paceline.train.schedule import lr_factor
from paceline.train.seeding import seed_shard


class AsynchronousSteps:
    """The steps of a run, update by update, as the servers make them.

    Batch k of the run is batch k mod n of epoch k // n, for n batches an epoch: which samples it has, and what its
    shards look like, is the same function as in synchronous training.
    """

    def __init__(self, run: Run, engine: AsyncServers, train_set: Any, loss_fn: LossFn) -> None:
        assert run.world.group is not None
        self._run = run
        self._engine = engine
        self._train_set = train_set
        self._loss_fn = loss_fn
        self._orders: dict[int, EpochOrder] = {}
        self._num_batches = self._order(0).num_batches
        run.set_lr_factor(1.0)  # servers scale the rates that they find
        course = Course(self._num_shards, self._lr_factor, run.steps)
        self._servers = open_servers(run.job, run.plan, run.rank, run.world.group, run.optimizer, course)

    @contextmanager
    def opened(self) -> Iterator[Callable[[int], Iterator[Tensor]]]:
        """Inside, `epoch` works; at the end the run is saved. A common act of all workers."""
        with self._servers:
            yield self.epoch
            with self._engine.at_rest(self._servers.collect):
                self._run.save_end()

    def epoch(self, epoch: int) -> Iterator[Tensor]:
        """Work until the epoch's updates are made; the mean loss of every batch, in order, on every worker.

        All rest where a checkpoint is due, at a step's number or because somebody requests it, and go on.
        """
        run = self._run
        batches = {epoch * self._num_batches + batch.number: batch for batch in run.enter_epoch(self._train_set, epoch)}
        if batches and run.steps != min(batches):
            raise JobError(
                f"This run has made {run.steps} updates by another global batch than {run.job.global_batch_size}, and "
                "asynchronous servers count by updates; set it back, or begin in another folder."
            )
        run.timer.resume()
        until = run.steps + len(batches)
        while run.steps < until:
            if run.steps:
                with self._engine.at_rest(self._servers.collect):
                    run.exchange_status_at_rest()
            for number, statistics in self._servers.work(self._compute, run.next_save(until), run.wants_save):
                loss = self._engine.shards.apply(statistics.to(run.device))
                run.schedule_lr(len(self._train_set))  # for the record: the servers have rates of their own
                run.count_step(batches[number])
                yield loss

    def _compute(self, batch: int, shard: int) -> Tensor:
        run = self._run
        epoch, _ = divmod(batch, self._num_batches)
        sizes = shard_sizes(len(self._samples(batch)), run.job.virtual_shards)
        share = Assignment(sizes, ((shard, shard + 1),), rank=0)  # as if it were all that this worker has
        (inputs,) = run.read(self._train_set, epoch, [self._samples(batch)[slice(*share.span)]], train=True)
        step = StepInput(
            assignment=share,
            batch=inputs,
            loss_of=lambda model, part: run.loss_of(model, part, self._loss_fn),
            seed_shard=lambda one: seed_shard(run.job.seed, batch, one, run.device),
            scale=lambda loss: loss,
        )
        return self._engine.shards.compute(step, shard)

    def _samples(self, batch: int) -> NDArray[np.int64]:
        epoch, number = divmod(batch, self._num_batches)
        return self._order(epoch).batch(number)

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            # Shards of two epochs may be under way at a time.
            self._orders = {number: order for number, order in self._orders.items() if number >= epoch - 1}
            job = self._run.job
            self._orders[epoch] = epoch_order(len(self._train_set), job.global_batch_size, job.seed, epoch)
        return self._orders[epoch]

    def _num_shards(self, batch: int) -> int:
        return len(shard_sizes(len(self._samples(batch)), self._run.job.virtual_shards))

    def _lr_factor(self, batch: int) -> float:
        epoch, number = divmod(batch, self._num_batches)
        num_samples = len(self._train_set)
        seen = epoch * num_samples + min(number * self._run.job.global_batch_size, num_samples)
        return lr_factor(self._run.job, seen, num_samples)
