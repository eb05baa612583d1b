"""`parity = "numeric"`: DistributedDataParallel, weighted so that the sum over workers is the global mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Aggregator, HookState, aggregate
from paceline.errors import ModelError
from paceline.parallel.aggregation import compressor_state, load_compressor_state
from paceline.parallel.assignment import Assignment, ShardRange
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import (
    EqualAfterEveryStep,
    HoldsAll,
    StepInput,
    broadcast,
    check_loss,
    cut,
    statistics_dtype,
)
from paceline.parallel.generators import generator_states
from paceline.parallel.gradient_norms import GradientNorms, WorkerNorms, squared_norm
from paceline.parallel.norm import (
    NormStatistics,
    ShardBatchNorm,
    SyncBatchNorm,
    replace_batch_norm,
    standing_in,
    unknown_buffers,
)
from paceline.spec import Job, Plan

# The argument's name before and since torch 2.13.
_BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


class DataParallel(EqualAfterEveryStep, HoldsAll):
    """Equal on any number of workers up to rounding; gradients travel in buckets while backward goes on.

    A worker's shards go through the model together. That is only right if the forward pass draws no random numbers
    (a dropout mask belongs to its shard), so the very first piece is one shard, and if it is seen to draw any, this
    worker computes its shards one by one from then on.

    Gradient noise shows between workers; alone, between the first of several pieces and all of them.
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
        self._model = self._with_norm(model, job, plan, group)
        self._plan = plan
        self._group = group
        self._device = device
        self._clock = Clock(device)
        self._norm = NormStatistics(self._model)
        self._dtype = statistics_dtype(self._model)
        self._whole_share_only = job.norm == "sync" and self._has(SyncBatchNorm)
        # Where a norm's statistics depend on the whole share, it is not split for the sake of randomness.
        self._may_split = job.norm == "shard" or not self._has(_BatchNorm)
        self._draws_randomness: bool | None = None
        self._aggregated = self._last_gradient = self._clock.mark()
        self._hook_called = False
        self._worker_norms = WorkerNorms(self._zero_loss())
        self._aggregator = aggregator
        self._hook_state: HookState | None = None
        self.module = self._model if aggregator is None else self._wrap(aggregator, find_unused_parameters)

    @staticmethod
    def _with_norm(model: nn.Module, job: Job, plan: Plan, group: dist.ProcessGroup | None) -> nn.Module:
        if job.norm == "shard":
            return replace_batch_norm(model, ShardBatchNorm)
        if job.norm == "sync":
            model = replace_batch_norm(model, SyncBatchNorm)
            # A group of its own: its collectives interleave with the buckets' in backward.
            own = None if group is None else dist.new_group(timeout=timedelta(seconds=plan.timeout_s))
            for layer in model.modules():
                if isinstance(layer, SyncBatchNorm):
                    layer.group = own
        return model

    def _has(self, kind: type[nn.Module]) -> bool:
        return any(isinstance(layer, kind) for layer in self._model.modules())

    def _wrap(self, aggregator: Aggregator, find_unused_parameters: bool) -> DistributedDataParallel:
        group = aggregator.links.group
        if find_unused_parameters:
            # DDP then sums, in backward, who used what: a collective that must not come between the scheduler's.
            group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timedelta(seconds=self._plan.timeout_s),
                use_local_synchronization=True,
            )
        ddp = DistributedDataParallel(
            self._model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            process_group=group,
            **cast(Any, {_BROADCAST_BUFFERS: bool(unknown_buffers(self._model))}),
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._model.named_parameters()}
        self._hook_state = HookState(aggregator, names, on_last_bucket=self._on_last_bucket)

        def hook(state: HookState, bucket: Any) -> Any:
            self._worker_norms.bucket_filled(bucket.buffer())
            return aggregate(state, bucket)

        # DDP compares annotations, if there are any, with the classes themselves.
        hook.__annotations__.clear()
        ddp.register_comm_hook(self._hook_state, hook)
        return ddp

    def _on_last_bucket(self) -> None:
        self._hook_called = True
        self._last_gradient = self._clock.mark()

    @property
    def communication(self) -> tuple[Mark, Mark]:
        return self._last_gradient, self._aggregated

    def gradients(self, step: StepInput) -> Tensor:
        self._hook_called = False
        if self._aggregator is not None:
            self._aggregator.scheduler.begin_step()
        self._norm.shards.all = step.share.all_sizes
        # What a compressor lets through is not the sum of what it was given.
        is_sum = self._aggregator is not None and self._aggregator.compressor is None
        self._worker_norms.begin(step.share, step.take_norms if is_sum else None)
        summed = self._working_step(step) if step.share.sizes else self._idle_step(step)
        self._norm.shards.current = None
        if self._aggregator is not None:
            self._aggregator.scheduler.raise_error()
        if self._group is None:
            self._last_gradient = self._clock.mark()
        elif not self._hook_called:
            raise ModelError(self._why_nothing_was_aggregated())
        self._norm.apply(summed[1:-1])
        self._aggregated = self._clock.mark()
        self._worker_norms.end(summed[-1])
        return summed[0]

    def _why_nothing_was_aggregated(self) -> str:
        trained = [(name, p.grad) for name, p in self._model.named_parameters() if p.requires_grad]
        without = [name for name, grad in trained if grad is None]
        if 0 < len(without) < len(trained):
            return (
                f"The parameter '{without[0]}' got no gradient, which other workers wait for; call run.prepare with "
                "find_unused_parameters=True, or freeze what the loss never uses before run.prepare."
            )
        return (
            "The loss did not go through the prepared model, so no gradient was aggregated; call the model that "
            "run.prepare returned, or the one the loss function is given."
        )

    @property
    def changes_buffers(self) -> bool:
        return bool(unknown_buffers(self._model))

    def sync_buffers(self) -> bool:
        broadcast(unknown_buffers(self._model), self._group)
        return True

    def shared_state(self) -> dict[str, Any]:
        # Known already, it makes the first step after a resume equal to what that step would have been.
        return {"draws_randomness": self._draws_randomness}

    def own_state(self) -> dict[str, Any]:
        return compressor_state(self._aggregator)

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self._draws_randomness = shared.get("draws_randomness")
        load_compressor_state(self._aggregator, own)

    def _working_step(self, step: StepInput) -> Tensor:
        next_shard, stop = step.share.runs[step.share.rank]
        losses = self._zero_loss()
        # The very first step is cut in two only to see whether the model draws random numbers.
        wants_norms = step.take_norms is not None and self._group is None and self._draws_randomness is not None
        first: tuple[ShardRange, Tensor] | None = None
        while True:
            piece = self._next_piece(step.share, next_shard)
            next_shard += len(piece.sizes)
            is_last = next_shard == stop
            self._norm.shards.current = piece.sizes
            with nullcontext() if is_last or self._group is None else self.module.no_sync():  # type: ignore[operator]
                loss = check_loss(self._forward(step, piece))
                losses += loss.detach() * piece.weight
                if is_last:
                    # The step's loss and norm statistics are known: they travel while backward computes.
                    summed, arrived = self._start_sum(losses)
                with self._norm.backward():
                    step.scale(loss * piece.weight).backward()
            if is_last:
                arrived()
                if first is not None and step.take_norms is not None:
                    piece, small_sqr = first
                    large_sqr, large_batch = squared_norm(self._gradients()), step.share.global_size
                    step.take_norms(GradientNorms(small_sqr, sum(piece.sizes), large_sqr, large_batch))
                return summed
            if wants_norms and first is None:
                first = piece, squared_norm(self._gradients()) / piece.weight**2

    def _next_piece(self, share: Assignment, first_shard: int) -> ShardRange:
        one_by_one = self._may_split and self._draws_randomness is not False
        piece = share.piece(first_shard, 1 if one_by_one else self._plan.micro_batch_size)
        if self._whole_share_only and len(piece.sizes) < len(share.sizes):
            raise ModelError(
                "norm = 'sync' normalises over the whole global batch in one forward pass, so it cannot be cut into "
                f"micro-batches of {self._plan.micro_batch_size}; leave micro_batch_size out or use norm = 'shard'."
            )
        return piece

    def _forward(self, step: StepInput, piece: ShardRange) -> Tensor:
        step.seed_shard(piece.first_shard)
        before = generator_states(self._device) if self._draws_randomness is None else ()
        loss = step.loss_of(self.module, cut(step.batch, piece.start, piece.stop))
        if self._draws_randomness is None:
            self._draws_randomness = before != generator_states(self._device)
            if self._draws_randomness and self._whole_share_only:
                raise ModelError(
                    "norm = 'sync' takes all shards of a worker through the model at once, but this model draws random "
                    "numbers (dropout), which belong to one shard each: the result would depend on the number of "
                    "workers; use norm = 'shard'."
                )
        return loss

    def _idle_step(self, step: StepInput) -> Tensor:
        """No sample for this worker: one stand-in sample that counts for nothing keeps all collectives in step."""
        assert self._hook_state is not None  # alone, a worker has every sample
        self._hook_state.idle = True
        try:
            with standing_in(self._model):
                loss = check_loss(step.loss_of(self.module, cut(step.batch, 0, 1)))
                summed, arrived = self._start_sum(self._zero_loss())
                step.scale(loss * 0.0).backward()
        finally:
            self._hook_state.idle = False
        arrived()
        return summed

    def _gradients(self) -> Iterator[Tensor]:
        return (parameter.grad for parameter in self._model.parameters() if parameter.grad is not None)

    def _zero_loss(self) -> Tensor:
        return torch.zeros((), dtype=self._dtype, device=self._device)

    def _start_sum(self, losses: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """Begin adding [loss, norm statistics, gradient norm] over all workers; the second value waits for the sum."""
        mine = torch.cat([losses.view(1), *self._norm.collect(losses), self._worker_norms.to_be_summed])
        if self._aggregator is None:
            return mine, lambda: None
        return mine, self._aggregator.sum_exactly(mine, "loss and norm statistics").wait
