"""Sharded, pipeline and tensor parallelism in any combination: the engine for all meshes but plain data parallelism.

`spread_model.py` cuts and shards the model. A step computes what one worker alone would: losses are weighted by
samples, gradients are sums over virtual shards, and no number of workers appears in any formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import Aggregator, open_links
from paceline.dtensor_type import local_shard
from paceline.parallel.assignment import Assignment
from paceline.parallel.audit import audit
from paceline.parallel.axes import Axes
from paceline.parallel.clock import mark
from paceline.parallel.dtensor import rescale_gradients
from paceline.parallel.engine import Engine, StepInput, broadcast
from paceline.parallel.engines.piped_passes import micro_batch_of, stand_in_batch
from paceline.parallel.gradients.aggregation import set_up_aggregation
from paceline.parallel.gradients.gradient_norms import GradientNorms
from paceline.parallel.gradients.replica_sums import ReplicaSums
from paceline.parallel.host_facts import HostFacts
from paceline.parallel.losses import LossLayout, LossLayouts, StepLoss
from paceline.parallel.model_graph import ModelCall
from paceline.parallel.passes import Passed, Passes
from paceline.parallel.sharding.spread_model import SpreadModel
from paceline.spec import Job, Plan

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


class MeshParallel(Engine):
    """The model is sharded over a mesh; a step is equal on any mesh up to rounding.

    All workers of an fsdp axis go through the same collectives in every pass, so one with fewer shards than others
    computes stand-in samples that count for nothing.
    """

    holds_all = False

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        plan: Plan,
        device: torch.device,
        axes: Axes,
        example: ModelCall | None,
        *,
        may_skip: bool = False,
    ) -> None:
        """
        Args:
            example: how the model is called, for a few samples; to cut it into stages.
            may_skip: whether some parameters get no gradient in some steps, on some workers.
        """
        self._axes = axes
        self._spread = SpreadModel(
            model, plan, device, axes, example, may_skip=may_skip, before_last_backward=self._before_last_backward
        )
        super().__init__(self._spread.module, device, LossLayouts(axes.world))
        self._pipeline = self._spread.pipeline
        self.notes: list[str] = list(self._spread.notes)
        self.passes = Passes(self.module, device, self.layouts)
        self.passes.blocks = None if self._pipeline is None else self._pipeline.blocks
        self._zero = self.passes.like = self._spread.zero  # of all of the model: a stage may have no parameter
        self.buffers = self.passes.buffers
        num_parameters = len(list(self.module.parameters()))
        self._host_facts = HostFacts(axes, num_parameters if axes.dp is not None or may_skip else 0, plan.timeout_s)
        self._aggregator: Aggregator | None = None
        self._replica_sums: ReplicaSums | None = None
        if axes.dp is not None:
            self._aggregate_replicas(job, plan, axes.dp)
        if job.measure_noise and not (axes.mesh.dp > 1 or self._adds_up_every_pass):
            self.notes.append(f"the gradient noise scale is not measured under the strategy {axes.mesh}")

    def _aggregate_replicas(self, job: Job, plan: Plan, group: dist.ProcessGroup) -> None:
        trained = [local_shard(parameter) for parameter in self.module.parameters() if parameter.requires_grad]
        aggregation = set_up_aggregation(job, plan, open_links(group, self._device, plan.timeout_s), trained)
        self._aggregator, self.algorithm = aggregation.aggregator, aggregation.algorithm
        self.notes += aggregation.notes
        shared = () if self._pipeline is None else self._pipeline.shared_parameters
        self._replica_sums = ReplicaSums(self.module, self._spread.stages, shared, aggregation.aggregator, self._device)

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - whatever it is
        if self._replica_sums is not None:
            self._replica_sums.close()
        if self._aggregator is not None:
            self._aggregator.scheduler.close()

    # --- a step ---

    def gradients(self, step: StepInput) -> StepLoss:
        if self._aggregator is not None:
            self._aggregator.scheduler.begin_step()
        step = replace(step, loss_of=self._spread.checked(step.loss_of))
        assignment = step.assignment
        if self._replica_sums is not None:
            self._replica_sums.begin_step()
        passed = self._compute(step) if self._pipeline is None else self._piped(self._pipeline, step)
        layout = self.layouts.of(step.loss_name)
        sums, weights = self._sum_what_is_known(step, layout, passed)
        result = StepLoss.of(sums, layout)
        last_gradient = mark(self._device)
        num_replicas = sum(self._samples_of_replica(assignment, one) > 0 for one in range(self._axes.mesh.dp))
        replicas_sqr: Tensor | None = None
        if step.take_norms is not None and num_replicas > 1:  # one alone shows no noise
            own_weight = weights[self._axes.mesh.place(dist.get_rank(self._axes.world))["dp"]]
            # Of the replicas' own gradients before they are added up; each counts as one of dp copies there.
            replicas_sqr = self._spread.squared_norm(own_weight, result.rescale) * self._axes.mesh.dp
        if self._replica_sums is not None:
            self._replica_sums.finish()
        self._spread.sum_whole_gradients()
        rescale_gradients(self.module.parameters(), result.rescale)
        size = assignment.global_size
        if step.take_norms is not None and replicas_sqr is not None:
            step.take_norms(GradientNorms(replicas_sqr, size / num_replicas, self._spread.squared_norm(), size))
        elif step.take_norms is not None and passed.first_sqr is not None:
            first_sqr = passed.first_sqr / weights[-1] ** 2
            step.take_norms(GradientNorms(first_sqr, passed.first_samples, self._spread.squared_norm(), size))
        self.communication = last_gradient, mark(self._device)
        return result

    def audit(self, step: StepInput) -> None:
        if self._pipeline is None:
            audit(self.passes, step, self._axes.world, has_gradients=False)

    def _sum_what_is_known(
        self, step: StepInput, layout: LossLayout, passed: Passed
    ) -> tuple[Tensor, Sequence[float] | Tensor]:
        """The sums over workers that a step needs besides its gradients, in one message; returns those of the loss, and
        the weight in it of each replica and, last, of all workers' first passes together."""
        trained = [p for p in self.module.parameters() if p.requires_grad] if self._gradients_may_differ else []
        zero = self._zero
        told = self._host_facts.begin(self._uses(trained))
        losses = zero.new_zeros(layout.length) if passed.losses is None else passed.losses
        weights = self._weights_to_add(step.assignment, losses, passed) if layout.is_weighted else zero.new_zeros(0)
        parts = [losses, weights, self.buffers.collect(zero)]
        summed = torch.cat(parts)
        if self._axes.data is not None:
            dist.all_reduce(summed, group=self._axes.data)
        losses, weights, moved = torch.split(summed, [len(part) for part in parts])
        if self._axes.pp is not None:
            # Only the last stage knows the loss; and buffers of all stages move, or none.
            known = torch.cat([losses, weights, moved.sum().view(1) * 0.0])
            dist.all_reduce(known, group=self._axes.pp)
            losses, weights, poison = torch.split(known, [layout.length, len(weights), 1])
            moved = moved + poison
        uses = told()
        self.buffers.combine(moved, self._sum_moves, lambda values: broadcast(values, self._axes.data))
        _agree_on_gradients(trained, uses)
        if layout.is_weighted:
            return losses, weights
        num_samples = [self._samples_of_replica(step.assignment, one) for one in range(self._axes.mesh.dp)]
        return losses, [num / step.assignment.global_size for num in (*num_samples, passed.first_samples)]

    def _weights_to_add(self, assignment: Assignment, losses: Tensor, passed: Passed) -> Tensor:
        """This worker's part of the weights of all replicas, and of those of all workers' first passes."""
        weights = losses.new_zeros(self._axes.mesh.dp + 1)
        weights[assignment.rank // self._axes.mesh.fsdp] = losses[1]
        weights[-1] = passed.first_weight
        return weights

    def _sum_moves(self, numbers: list[int]) -> Tensor:
        total = self.buffers.moves(numbers)
        if self._axes.data is not None:
            dist.all_reduce(total, group=self._axes.data)
        return total

    def _uses(self, trained: Sequence[Tensor]) -> list[bool]:
        """Which of these parameters this worker has used."""
        gradients = [None if parameter.grad is None else local_shard(parameter.grad) for parameter in trained]
        uses = [gradient is not None for gradient in gradients]
        if self._spread.may_skip and any(uses):
            # A parameter that may be unused was added up all the same, as zeros: the host waits for the device, once.
            known = torch.stack([self._zero if one is None else one.any().to(self._zero) for one in gradients])
            uses = known.bool().tolist()
        return uses

    @property
    def _gradients_may_differ(self) -> bool:
        """Whether workers may have gradients of different parameters."""
        return self._axes.dp is not None or self._spread.may_skip

    def _samples_of_replica(self, assignment: Assignment, replica: int) -> int:
        degree = self._axes.mesh.fsdp
        of_workers = assignment.shards_of_rank[replica * degree :][:degree]
        return sum(sum(assignment.shard_sizes[start:stop]) for start, stop in of_workers)

    def _compute(self, step: StepInput) -> Passed:
        """This worker's shards forward and backward."""
        assignment, passes = step.assignment, self.passes
        of_ranks = [stop - start for start, stop in assignment.shards_of_rank]
        first, stop = assignment.own
        # Collectives in forward and backward: all workers go through as many passes as the busiest one.
        num_passes = max(of_ranks)
        passed = Passed()
        wants_norms = self._adds_up_every_pass and step.take_norms is not None
        for number in range(num_passes):
            self._spread.sync_gradients(self.module, False)
            if number == num_passes - 1:
                self._before_last_backward(self.module)
            if first + number < stop:
                loss = passes.forward(step, self.module, first + number)
                passed.add(loss)
                passes.backward(step, loss)
            else:
                with passes.stand_in(step, self.module) as stand_in:
                    stand_in.backward()
            if wants_norms and number == 0 and num_passes > 1:
                passed.first_sqr = self._spread.squared_norm()
                firsts = [start for start, stop in assignment.shards_of_rank if stop > start]
                passed.first_samples = sum(assignment.shard_sizes[one] for one in firsts)
        return passed

    @property
    def _adds_up_every_pass(self) -> bool:
        """Whether gradients of all workers are in `.grad` after every pass."""
        mesh = self._axes.mesh
        return mesh.dp == mesh.pp == 1 and (mesh.fsdp == 1 or mesh.zero_stage > 1)

    def _before_last_backward(self, stage: nn.Module) -> None:
        self._spread.sync_gradients(stage, True)
        if self._replica_sums is not None:
            self._replica_sums.await_last(stage)

    def _piped(self, pipeline: Pipeline, step: StepInput) -> Passed:
        """Send this worker's shards through the stages, and stand-ins until it has as many as others along fsdp."""
        assignment, passed = step.assignment, Passed()
        micro_batches = [micro_batch_of(self.passes, step, one, passed.add) for one in range(*assignment.own)]
        nothing = stand_in_batch(self.passes, step, self.module)
        if self._axes.mesh.fsdp > 1:
            most = max(stop - start for start, stop in assignment.shards_of_rank)
            micro_batches += [nothing] * (most - len(micro_batches))
        self._spread.sync_gradients(self.module, False)
        pipeline.train_step(micro_batches, nothing)
        self.passes.seeds.end()
        return passed

    # --- the whole model ---

    def gradient_norms(self) -> list[Tensor]:
        return [self._spread.squared_norm().sqrt()]

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._spread.whole(tensors)


def _agree_on_gradients(trained: Sequence[Tensor], are_used: Sequence[bool]) -> None:
    """A parameter that any worker used gets a gradient on all workers; one that no worker used gets none."""
    for parameter, is_used in zip(trained, are_used, strict=True):
        if not is_used:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
