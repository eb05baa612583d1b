"""`parity = "numeric"`: DistributedDataParallel, weighted so that the sum over workers is the global mean."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Aggregator, Bucket
from paceline.errors import ModelError
from paceline.parallel.audit import audit
from paceline.parallel.clock import mark
from paceline.parallel.dtensor import rescale_gradients
from paceline.parallel.engine import Engine, StepInput, broadcast, statistics_dtype
from paceline.parallel.gradients.gradient_norms import GradientNorms, WorkerNorms, squared_gradient_norm
from paceline.parallel.losses import LossLayouts, StepLoss
from paceline.parallel.passes import Passed, Passes
from paceline.process_groups import open_group
from paceline.spec import Plan


class DataParallel(Engine):
    """The engine of data parallelism, equal on any number of workers up to rounding.

    The gradients of a worker's shards add up in `.grad`, and buckets of them are summed over workers while the last
    shard's backward pass goes on. Gradient noise is measured between workers, or on one worker between the first of
    several shards and all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        device: torch.device,
        group: dist.ProcessGroup | None,
        aggregator: Aggregator | None,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__(model, device, LossLayouts(group))
        self._plan = plan
        self._group = group
        self._zero = torch.zeros((), dtype=statistics_dtype(self.module), device=device)
        self._last_gradient = self.communication[1]
        self._hook_called = False
        self._is_idle = False
        """Whether this worker's gradients come from a stand-in and must count for nothing."""
        self._worker_norms = WorkerNorms(self._zero)
        self._aggregator = aggregator
        self._parameters = list(self.module.parameters())
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        self._arrived: Callable[[], object] | None = None
        """Waits for the sum of the step's losses, once it has begun."""
        self._trained = self._trained_now()
        # It arranges and sends buckets. Its forward pass is never called: the loss function gets the model itself, so
        # that attributes and other methods than `forward` are there, and right, on any number of workers.
        self._ddp: DistributedDataParallel | None = None
        of_uses = _group_of_uses(group, plan) if find_unused_parameters else None
        if aggregator is not None:
            self._ddp = DistributedDataParallel.__new__(DistributedDataParallel)
            self._set_up(self._ddp, of_uses or aggregator.links.group, find_unused_parameters)
        self.passes = Passes(self.module, device, self.layouts)
        self.buffers = self.passes.buffers

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - whatever it is
        if self._aggregator is not None:
            self._aggregator.scheduler.close()

    def _trained_now(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _set_up(self, ddp: DistributedDataParallel, group: dist.ProcessGroup, find_unused_parameters: bool) -> None:
        """Have `ddp` aggregate the gradients of all parameters that are trained now; a collective.

        Again where a user has frozen or unfrozen some, in the same object: the script may hold it.
        """
        DistributedDataParallel.__init__(
            ddp,
            self.module,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        # `gradients` does it, however many forward passes there are. (The argument has another name since torch 2.13.)
        ddp.broadcast_buffers = False
        # DDP compares annotations, if there are any, with the classes themselves: a lambda has none. Garbage collection
        # does not see who holds it, so that it would keep the engine, its model and its groups for ever.
        engine = weakref.proxy(self)
        ddp.register_comm_hook(None, lambda _state, bucket: engine._aggregate(bucket))
        self._trained = self._trained_now()

    def _set_up_again(self) -> None:
        self._trained = self._trained_now()
        ddp = self._ddp
        if ddp is not None:
            for parameter in self.module.parameters():
                parameter.grad = None  # a slice of an old bucket
            self._set_up(ddp, ddp.process_group, ddp.find_unused_parameters)

    def _aggregate(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: a future of the bucket's *sum* over all workers, in flight while backward goes on.

        The mean over samples is in the loss weights already.
        """
        assert self._aggregator is not None
        if bucket.is_last():
            self._hook_called = True
            self._last_gradient = mark(self._device)
        values = bucket.buffer()
        self._worker_norms.bucket_filled(values)
        if self._is_idle:
            # Not by a loss of weight zero alone: zero times a stand-in's overflow would be NaN for everybody.
            values.zero_()
        names = [self._names[parameter] for parameter in bucket.parameters()]
        parts = tuple(zip(names, bucket.gradients(), strict=True))
        return self._aggregator.sum_bucket(Bucket(values, parts))

    @contextmanager
    def _idling(self) -> Iterator[None]:
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    def gradients(self, step: StepInput) -> StepLoss:
        self._hook_called = False
        if self._aggregator is not None:
            self._aggregator.scheduler.begin_step()
            self._aggregator.scheduler.release()  # in the second step there are new buckets, beside old ones otherwise
        if list(map(id, self._trained_now())) != list(map(id, self._trained)):
            self._set_up_again()
        if self._ddp is not None:
            self._worker_norms.forget_buckets()
            self._ddp.reducer._rebuild_buckets()  # a collective after the first backward pass, then nothing
        summed, passed = self._train(step) if step.assignment.sizes else self._idle(step)
        if self._aggregator is not None:
            self._aggregator.scheduler.raise_error()
        if self._group is None:
            self._last_gradient = mark(self._device)
        elif not self._hook_called:
            raise ModelError(self._why_nothing_was_aggregated())
        layout = self.layouts.of(step.loss_name)
        losses, moved, small_sqr = summed.split([layout.length, self.buffers.num_sums, 1])
        self.buffers.combine(moved, self._sum_moves, lambda values: broadcast(values, self._group))
        result = StepLoss.of(losses, layout)
        rescale_gradients(self.module.parameters(), result.rescale)
        self.communication = self._last_gradient, mark(self._device)
        size = step.assignment.global_size
        own_weight: float | Tensor = sum(step.assignment.sizes) / size
        if layout.is_weighted and passed.losses is not None:
            own_weight = passed.losses[1]
        self._worker_norms.end(small_sqr, own_weight, result.rescale)
        if passed.first_sqr is not None and step.take_norms is not None:
            first_sqr, large_sqr = passed.first_sqr / passed.first_weight**2, squared_gradient_norm(self.module)
            step.take_norms(GradientNorms(first_sqr, passed.first_samples, large_sqr, size))
        return result

    def audit(self, step: StepInput) -> None:
        # Where parameters may be unused, DDP remembers until the end of the next step which ones have got a gradient.
        may_skip = self._ddp is not None and self._ddp.find_unused_parameters
        audit(self.passes, step, self._group, has_gradients=not may_skip)

    def _sum_moves(self, numbers: list[int]) -> Tensor:
        total = self.buffers.moves(numbers)
        if self._aggregator is not None:
            self._aggregator.sum_now(total, "buffers")
        return total

    def _train(self, step: StepInput) -> tuple[Tensor, Passed]:
        """Compute and aggregate the gradient; returns what `_start_sum` does, and what came of the passes."""
        self._begin_norms(step)
        wants_norms = self._group is None and step.take_norms is not None
        passed = Passed()
        for shard, loss in self.passes.losses(step, self.module):
            passed.add(loss)
            is_last = shard + 1 == step.assignment.own[1]
            if is_last:
                # All of the step's losses are known: they are summed while backward computes.
                summed = self._start_sum(step, passed.losses)
                self._aggregate_next(loss.mean)
            self.passes.backward(step, loss)
            if wants_norms and passed.first_sqr is None and not is_last:
                passed.first_sqr = squared_gradient_norm(self.module)
                passed.first_samples = step.assignment.shard_sizes[shard]
        self._await_sum()
        return summed, passed

    def _idle(self, step: StepInput) -> tuple[Tensor, Passed]:
        """`_train` for a worker without samples: a stand-in sample lets it take part in all collectives."""
        self._begin_norms(step)
        with self._idling(), self.passes.stand_in(step, self.module) as loss:
            summed = self._start_sum(step, None)
            self._aggregate_next(loss)
            loss.backward()
        self._await_sum()
        return summed, Passed()

    def _begin_norms(self, step: StepInput) -> None:
        self._worker_norms.begin(step.assignment, step.take_norms if self._aggregator is not None else None)

    def _aggregate_next(self, loss: Tensor) -> None:
        """Let DistributedDataParallel aggregate in the next backward pass, as its own forward pass would."""
        if self._ddp is not None:
            self._ddp.reducer.prepare_for_backward([loss] if self._ddp.find_unused_parameters else [])

    def _start_sum(self, step: StepInput, losses: Tensor | None) -> Tensor:
        """Begin adding up what all workers know of a step besides their gradients.

        Args:
            losses: this worker's sums; None where it has no sample.

        Returns:
            [losses, what buffers were moved by, gradient norm]; of all workers after `_await_sum`.
        """
        layout = self.layouts.of(step.loss_name)
        own = self._zero.new_zeros(layout.length) if losses is None else losses
        mine = torch.cat([own, self.buffers.collect(own), self._worker_norms.to_be_summed])
        if self._aggregator is not None:
            self._arrived = self._aggregator.sum_exactly(mine, "losses and buffers").wait
        return mine

    def _await_sum(self) -> None:
        if self._arrived is not None:
            self._arrived()

    def gradient_norms(self) -> list[Tensor]:
        if self._ddp is None or any(parameter.grad is None for parameter in self._trained):
            return super().gradient_norms()
        return [self._worker_norms.squared_sum().sqrt()]  # one pass over the buckets, which hold all gradients

    def _why_nothing_was_aggregated(self) -> str:
        trained = [(name, p.grad) for name, p in self.module.named_parameters() if p.requires_grad]
        without = [name for name, grad in trained if grad is None]
        if 0 < len(without) < len(trained):
            return (
                f"The parameter '{without[0]}' got no gradient, which other workers wait for; call run.prepare with "
                "find_unused_parameters=True, or freeze what the loss never uses before run.prepare."
            )
        if trained and not without:  # earlier passes of this step have left gradients
            if self._ddp is not None and self._ddp.find_unused_parameters:
                return (
                    "In this worker's last pass of the step the loss did not go through the prepared model, and other "
                    "workers wait for a gradient: where there is nothing to train on, let the loss depend on its "
                    "parameters all the same, return paceline.Mean(0 * sum(p.sum() for p in model.parameters()), "
                    "weight=0)."
                )
            return (
                "Some parameter got no gradient in this worker's last pass of the step, which other workers wait for; "
                "call run.prepare with find_unused_parameters=True, or use every parameter in every pass."
            )
        return (
            "The loss did not go through the prepared model, so no gradient was aggregated; call the model that "
            "run.prepare returned, or the one the loss function is given."
        )


def _group_of_uses(group: dist.ProcessGroup | None, plan: Plan) -> dist.ProcessGroup | None:
    """A group in which DDP sums, in backward, which parameters were used: with the scheduler's sums it would mix.

    A collective of all workers of the run; None for one that has no others in `group`.
    """
    if dist.group.WORLD is None:
        return None
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return open_group(ranks, plan.timeout_s)
