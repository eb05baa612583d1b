"""`parity = "numeric"`: DistributedDataParallel, weighted so that the sum over workers is the global mean."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from paceline.comm import Aggregator, Bucket
from paceline.errors import ModelError
from paceline.parallel.batch_norm.norm import ShardBatchNorm, has_other_norms, replace_batch_norm, unknown_buffers
from paceline.parallel.batch_norm.sync_norm import SyncBatchNorm
from paceline.parallel.clock import mark
from paceline.parallel.dtensor import rescale_gradients
from paceline.parallel.engine import Engine, StepInput, broadcast, statistics_dtype
from paceline.parallel.gradients.gradient_norms import GradientNorms, WorkerNorms, squared_gradient_norm
from paceline.parallel.loss.loss_functions import LossFunctions
from paceline.parallel.losses import StepLoss
from paceline.parallel.micro_batch import MicroBatchLimit, free_memory, is_out_of_memory, nothing_of
from paceline.parallel.shards.outcomes import Passed, StartOverError
from paceline.parallel.shards.passes import Passes
from paceline.private_groups import private_group
from paceline.process_groups import open_group
from paceline.spec import Job, Plan

_SYNC_REFUSAL = (
    "norm = 'sync' takes all shards of a worker through the model at once, but {}: the result would depend on the "
    "number of workers; use norm = 'shard'."
)


class DataParallel(Engine):
    """The engine of data parallelism, equal on any number of workers up to rounding; buckets overlap with backward.

    Gradient noise is measured between workers, or on one worker between the first of several passes and all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        plan: Plan,
        device: torch.device,
        group: dist.ProcessGroup | None,
        aggregator: Aggregator | None,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__(_with_norm(model, job, plan, group), device, LossFunctions(group))
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
        self._in_buckets: set[Tensor] = set()
        """The parameters whose gradients the last backward pass has computed so far; known for "auto" only."""
        self.micro_batch: MicroBatchLimit = MicroBatchLimit(plan, job)
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._has_stepped = False
        self._trained = self._trained_now()
        # It arranges and sends buckets. Its forward pass is never called: the loss function gets the model itself, so
        # that attributes and other methods than `forward` are there, and right, on any number of workers.
        self._ddp: DistributedDataParallel | None = None
        of_uses = _group_of_uses(group, plan) if find_unused_parameters else None
        if aggregator is not None:
            self._ddp = DistributedDataParallel.__new__(DistributedDataParallel)
            self._set_up(self._ddp, of_uses or aggregator.links.group, find_unused_parameters)
        self._has_other_norms = has_other_norms(self.module)
        self._is_sync = any(isinstance(layer, SyncBatchNorm) for layer in self.module.modules())
        self._passes = Passes(
            self.module,
            device,
            self.functions,
            self.micro_batch,
            one_by_one=job.shard_by_shard,
            may_split=not self._has_other_norms,
            refusal=_SYNC_REFUSAL if self._is_sync else "",
        )
        self.forward_buffers = self._passes.buffers

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - whatever it is
        for hook in self._hooks.values():  # garbage collection does not see what these hold
            hook.remove()
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
        if self.micro_batch.is_automatic:
            for parameter in self._trained:
                if parameter not in self._hooks:
                    hook = parameter.register_post_accumulate_grad_hook(self._in_buckets.add)
                    self._hooks[parameter] = hook

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
        if self._has_other_norms:
            self.sync_buffers()
        notes = self._passes.find_coupling(step, self.module)
        if self._ddp is not None:
            self._worker_norms.forget_buckets()
            self._ddp.reducer._rebuild_buckets()  # a collective after the first backward pass, then nothing
        if step.assignment.sizes or self.micro_batch.is_automatic:
            summed, passed = self._passes.starting_over(step, lambda: self._attempt(step))
        else:
            summed, passed = self._idle(step)
        if self._aggregator is not None:
            self._aggregator.scheduler.raise_error()
        if self._group is None:
            self._last_gradient = mark(self._device)
        elif not self._hook_called:
            raise ModelError(self._why_nothing_was_aggregated())
        layout = self.functions.layout(step.loss_name)
        losses, values, weights, small_sqr, changed = summed.split(
            [layout.length, *self._passes.norm.lengths, 1, len(self.forward_buffers)]
        )
        self._passes.norm.apply(values, weights)
        self.forward_buffers.combine(changed, self._sum_moves, lambda values: broadcast(values, self._group))
        result = replace(StepLoss.of(losses, layout, notes), own_notes=self.functions.take_found_late())
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
        self._has_stepped = True
        return result

    def _sum_moves(self, numbers: list[int]) -> Tensor:
        total = self.forward_buffers.moves(numbers)
        if self._aggregator is not None:
            self._aggregator.sum_now(total, "buffers")
        return total

    def _attempt(self, step: StepInput) -> tuple[Tensor, Passed]:
        """`_train`, or `_idle` without samples; with micro_batch_size = "auto" all workers end it alike.

        Raises:
            StartOverError: some worker ran out of memory with several shards in the model.
            ModelError: some worker ran out of memory with one.
        """
        if not self.micro_batch.is_automatic:
            return self._train(step)
        self._arrived = None
        num_shards, cause = 0, None
        try:
            sums = self._train(step) if step.assignment.sizes else self._idle(step)
        except (RuntimeError, MemoryError) as problem:
            if not is_out_of_memory(problem):
                raise
            num_shards = max(1, self._passes.num_shards_in_pass)
            cause = problem.with_traceback(None)  # its frames hold what the pass has computed
        if num_shards:
            free_memory(self._device)
            self._take_part_with_nothing(step)
        several, one = self._num_workers_out_of_memory(num_shards)
        if one:
            raise ModelError(self.micro_batch.shard_does_not_fit()) from cause
        if several:
            if not self._has_stepped:  # the first backward pass arranges the buckets; the next one is to be the first
                self._set_up_again()
            raise StartOverError(partial(self._passes.halve, step.assignment))
        return sums

    def _take_part_with_nothing(self, step: StepInput) -> None:
        """Go through what is left of the step's sums, which other workers wait for; the result is thrown away."""
        if self._ddp is None:
            return
        self._passes.norm.reset()
        with self._idling():
            if self._arrived is None:  # the last backward pass had not begun
                self._start_sum(step, None)
                self._aggregate_next(self._zero)
            missing = [parameter for parameter in self._trained if parameter not in self._in_buckets]
            if missing:
                nothing_of(missing).backward()
        self._await_sum()

    def _num_workers_out_of_memory(self, num_shards: int) -> tuple[int, int]:
        """The number of workers that ran out of memory with several shards in the model, and with one.

        Args:
            num_shards: this worker's; 0: its passes fitted.
        """
        counts = torch.tensor([float(num_shards > 1), float(num_shards == 1)], device=self._device)
        if self._aggregator is not None:
            self._aggregator.sum_now(counts, "out of memory")
        several, one = counts.tolist()
        return int(several), int(one)

    def _train(self, step: StepInput) -> tuple[Tensor, Passed]:
        """Compute and aggregate the gradient; returns what `_start_sum` does, and what came of the passes."""
        assignment = step.assignment
        self._begin_norms(step)
        if self._is_sync and len(self._passes.ranges(step, assignment.rank)) > 1:
            raise ModelError(
                "norm = 'sync' normalises over the whole global batch in one forward pass, so it cannot be split into "
                f"micro-batches of {self._plan.micro_batch_size}; leave micro_batch_size out or use norm = 'shard'."
            )
        wants_norms = self._group is None and self._passes.tells_noise(step)
        passed = Passed()
        for shards, loss in self._passes.losses(step, self.module):
            passed.add(loss)
            is_last = shards.stop_shard == assignment.own[1]
            if is_last:
                # The step's loss and norm statistics are known: they are summed while backward computes.
                summed = self._start_sum(step, passed.losses)
                self._aggregate_next(loss.mean)
            self._passes.backward(step, loss)
            if wants_norms and passed.first_sqr is None and not is_last:
                passed.first_sqr, passed.first_samples = squared_gradient_norm(self.module), sum(shards.sizes)
        self._await_sum()
        return summed, passed

    def _idle(self, step: StepInput) -> tuple[Tensor, Passed]:
        """`_train` for a worker without samples: a stand-in sample lets it take part in all collectives."""
        self.forward_buffers.begin_step()
        self._begin_norms(step)
        with self._idling(), self._passes.stand_in(step, self.module) as loss:
            summed = self._start_sum(step, None)
            self._aggregate_next(loss)
            loss.backward()
        self._await_sum()
        return summed, Passed()

    def _begin_norms(self, step: StepInput) -> None:
        self._worker_norms.begin(step.assignment, step.take_norms if self._aggregator is not None else None)

    def _aggregate_next(self, loss: Tensor) -> None:
        """Let DistributedDataParallel aggregate in the next backward pass, as its own forward pass would."""
        self._in_buckets.clear()
        if self._ddp is not None:
            self._ddp.reducer.prepare_for_backward([loss] if self._ddp.find_unused_parameters else [])

    def _start_sum(self, step: StepInput, losses: Tensor | None) -> Tensor:
        """Begin adding up what all workers know of a step besides their gradients.

        Args:
            losses: this worker's sums; None where it has no sample.

        Returns:
            [losses, norm statistics, gradient norm, which buffers were changed]; of all workers after `_await_sum`.
        """
        layout = self.functions.layout(step.loss_name)
        own = self._zero.new_zeros(layout.length) if losses is None else losses
        norms = self._worker_norms.to_be_summed
        mine = torch.cat([own, *self._passes.norm.collect(own), norms, *self.forward_buffers.changed(own)])
        if self._aggregator is not None:
            self._arrived = self._aggregator.sum_exactly(mine, "loss and norm statistics").wait
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

    def sync_buffers(self) -> bool:
        broadcast(unknown_buffers(self.module), self._group)
        return True


def _group_of_uses(group: dist.ProcessGroup | None, plan: Plan) -> dist.ProcessGroup | None:
    """A group in which DDP sums, in backward, which parameters were used: with the scheduler's sums it would mix.

    A collective of all workers of the run; None for one that has no others in `group`.
    """
    if dist.group.WORLD is None:
        return None
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return open_group(ranks, plan.timeout_s)


def _with_norm(model: nn.Module, job: Job, plan: Plan, group: dist.ProcessGroup | None) -> nn.Module:
    if job.norm == "shard":
        return replace_batch_norm(model, ShardBatchNorm)
    if job.norm == "sync":
        model = replace_batch_norm(model, SyncBatchNorm)
        # A group of its own: its collectives interleave with the buckets' in backward.
        own = None
        if group is not None:
            with private_group():
                own = dist.new_group(timeout=timedelta(seconds=plan.timeout_s))
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.group = own
    return model
