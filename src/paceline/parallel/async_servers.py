"""`aggregation.method = "parameter_server_async"`: the engine of a worker whose parameters are updated by servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.asynchronous import AsynchronousWorker
from paceline.comm.buckets import broadcast
from paceline.errors import JobError
from paceline.object_collectives import open_host_group
from paceline.parallel.engine import Engine, Update
from paceline.parallel.layout import Layout
from paceline.parallel.losses import LossLayout, StepLoss
from paceline.parallel.pass_state import frozen_batch_norms, preserved
from paceline.parallel.running_sum import RunningSum
from paceline.parallel.step_input import AnyShard, StepInput
from paceline.spec import Job, Plan
from paceline.words import number_of

_LOSS_NAME = "loss"
_RUN_S = 10 * 365 * 24 * 3600.0
"""The longest wait for the next call of a worker, which may come after any pause."""


class AsyncServers(Engine):
    """Idle workers compute the next virtual shards, of any global batch; servers make the updates.

    The servers start with the first step. From then on workers either work, until a number of updates is reached or
    a worker asks for a pause, or pause: then no gradient is in flight and all have the servers' parameters. They work
    from one `AnyShard.on_pause` to the next, through as many calls of `step` as updates are made in between.
    """

    reads_assignment = False
    changes_state = True
    weights_diverge = True  # the servers have the optimizer's state, and gradients are in flight, until `sync_buffers`
    is_synchronised = False  # status is exchanged in `AnyShard.on_pause`

    def __init__(self, model: nn.Module, job: Job, plan: Plan, device: torch.device, group: dist.ProcessGroup) -> None:
        layout = Layout(model, device, None)
        staleness = job.aggregation.staleness
        note = f"{number_of(plan.num_servers, 'parameter server')}, staleness {staleness}: " + (
            f"every gradient comes from parameters that are {number_of(staleness, 'update')} late, whatever the number "
            "and speed of workers; SGD's momentum is lowered for it"
            if staleness
            else "workers take shards as they come, the result is that of synchronous training"
        )
        super().__init__(layout, RunningSum(layout, None), notes=[note])
        self.buffers.finds_others = False
        self._job = job
        self._plan = plan
        self._group = group
        self._servers: AsynchronousWorker | None = None
        self._work: Iterator[tuple[int, Tensor]] | None = None
        """Yields the number and statistics of each batch until the next pause; None: this worker pauses."""
        self._any_shard: AnyShard | None = None
        self._layout: LossLayout | None = None
        """Which numbers the loss function returns; the same in all steps."""

    def step(self, step: StepInput, update: Update) -> StepLoss:  # noqa: ARG002 - the servers make it
        """Compute shards until the servers have made the update by this global batch; return its loss."""
        any_shard = self._any_shard = step.any_shard
        assert any_shard is not None
        if self._layout is None:
            # By a sample that leaves no trace.
            with frozen_batch_norms(self.module), preserved(self.buffers), torch.no_grad():
                self._layout = self.passes.zero_weight_loss(step).layout
            self.layouts.has_returned(_LOSS_NAME, self._layout)
        if self._servers is None:  # on the run's first workers
            with any_shard.at_base_rates() as optimizer:
                self._servers = AsynchronousWorker(
                    optimizer,
                    open_host_group(self._group, "calls of servers", _RUN_S),
                    any_shard.num_shards,
                    any_shard.lr_factor,
                    first_batch=any_shard.batch,
                    staleness=self._job.aggregation.staleness,
                    num_servers=self._plan.num_servers,
                    timeout_s=self._plan.timeout_s,
                )
        while True:
            if self._work is None:
                if any_shard.batch:
                    any_shard.on_pause()
                self.weights_diverge = True
                self._work = self._servers.work(
                    self._compute, any_shard.stop, any_shard.wants_pause, is_weighted=self._layout.is_weighted
                )
            for batch, statistics in self._work:
                assert batch == any_shard.batch
                if batch + 1 == any_shard.stop:
                    # Stop working after the last update and fetch the servers' parameters.
                    more = next(self._work, None)
                    assert more is None
                    self._work = None
                lengths = [self._layout.length, self.buffers.num_sums, 1]
                losses, changes, num_left_out = statistics.to(self.layout.device).split(lengths)
                self.buffers.end_step(changes)
                result = StepLoss.of(losses, self._layout)
                any_shard.updated(result.loss, not num_left_out)
                return result
            self._work = None  # some worker asked for a pause

    def _compute(self, batch: int, shard: int) -> tuple[Tensor, float]:
        """Leave the gradient of a shard in `.grad`; returns its statistics, and its weight.

        The statistics are those of `Passes.statistics`, then 1 if the batch makes no update because the shard's loss or
        gradient is not finite.
        """
        assert self._any_shard is not None
        # Whatever the script calls its function: the servers add up the same numbers for all batches.
        step = replace(self._any_shard.read(batch, shard), loss_name=_LOSS_NAME)
        for parameter in self.module.parameters():
            parameter.grad = None
        self.passes.enter(step, shard)
        loss = self.passes.read(step, shard)
        statistics = self.passes.statistics(step, shard, loss)
        self.passes.backward(step, loss)
        self.buffers.begin_pass()
        found = [loss.sums[0], *(p.grad for p in self.module.parameters() if p.grad is not None)]
        is_left_out = self._job.nonfinite != "ignore" and not all(bool(one.isfinite().all()) for one in found)
        weight = math.nan if is_left_out else float(loss.weight)
        return torch.cat([statistics, statistics.new_tensor([is_left_out])]), weight

    def close(self, error: BaseException | None = None) -> None:
        """Disconnect from the servers: with the other workers, or without them if an error ends the run."""
        if self._servers is not None:
            self._servers.close(error)
            self._servers = None

    def sync_buffers(self) -> bool:
        """While all workers pause: copy the optimizer's state from the servers to every worker."""
        if self._work is not None:
            return False
        if self._servers is not None:
            self._servers.collect()
        broadcast(self.module.buffers(), self._group)
        self.weights_diverge = False
        return True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Allowed while all workers pause, at the end of an epoch, when they have the servers' parameters."""
        if self._work is not None:
            raise JobError(
                "aggregation.method = 'parameter_server_async' has weights that all workers agree on at the end of an "
                "epoch only; call run.evaluate, run.consensus and the like there."
            )
        broadcast(self.module.buffers(), self._group)
        yield
