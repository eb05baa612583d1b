"""Sharded, pipeline and tensor parallelism in any combination: the engine for all meshes but plain data parallelism.

`spread_model.py` cuts and shards the model. A step computes what one worker alone would: losses are weighted by
samples, gradients are sums over virtual shards, and no number of workers appears in any formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import Aggregator, open_links
from paceline.dtensor_type import local_shard
from paceline.parallel.assignment import Assignment, ShardRange
from paceline.parallel.axes import Axes
from paceline.parallel.batch_norm.norm import ShardBatchNorm, replace_batch_norm, unknown_buffers
from paceline.parallel.clock import mark
from paceline.parallel.dtensor import rescale_gradients
from paceline.parallel.engine import Engine, StepInput, broadcast
from paceline.parallel.engines.piped_passes import check_repeatable_piped, micro_batch_of, stand_in_batch
from paceline.parallel.gradients.aggregation import set_up_aggregation
from paceline.parallel.gradients.gradient_norms import GradientNorms
from paceline.parallel.gradients.replica_sums import ReplicaSums
from paceline.parallel.host_facts import HostFacts
from paceline.parallel.kept.forward_buffers import refused_in_pipeline
from paceline.parallel.loss.loss_functions import LossFunctions
from paceline.parallel.losses import LossLayout, StepLoss
from paceline.parallel.micro_batch import MicroBatchLimit
from paceline.parallel.pipeline import ModelCall, Pipeline
from paceline.parallel.sharding.spread_model import SpreadModel
from paceline.parallel.shards.outcomes import Passed, StartOverError
from paceline.parallel.shards.passes import Passes
from paceline.spec import Job, Plan


class MeshParallel(Engine):
    """The model is sharded over a mesh; a step is equal on any mesh up to rounding.

    All workers of an fsdp axis go through the same collectives in every pass, so one with fewer shards than others
    computes stand-in samples that count for nothing. Whether the model draws random numbers is agreed at the end of a
    step: the first step goes shard by shard, and a step in which shards that went together drew any is made again.
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
        if job.norm == "shard":
            model = replace_batch_norm(model, ShardBatchNorm)
        self._axes = axes
        self._spread = SpreadModel(
            model, job, plan, device, axes, example, may_skip=may_skip, before_last_backward=self._before_last_backward
        )
        super().__init__(self._spread.module, device, LossFunctions(axes.world))
        self._pipeline = self._spread.pipeline
        self.notes: list[str] = list(self._spread.notes)
        self.micro_batch = MicroBatchLimit(plan, job)
        self._passes = Passes(
            self.module,
            device,
            self.functions,
            self.micro_batch,
            one_by_one=self._pipeline is not None or job.shard_by_shard,
        )
        self._zero = self._passes.like = self._spread.zero  # of all of the model: a stage may have no parameter
        self.forward_buffers = self._passes.buffers
        num_parameters = len(list(self.module.parameters()))
        self._host_facts = HostFacts(axes, num_parameters if axes.dp is not None or may_skip else 0, plan.timeout_s)
        self._has_drawn = self._has_drawn_anew = False
        self._suspect: ShardRange | None = None
        """Shards that look new in this step."""
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
        notes: list[str] = []
        if self._pipeline is None:
            notes += self._passes.find_coupling(step, self.module, in_step=True)
        else:
            check_repeatable_piped(self._passes, step, self.module)
        return self._passes.starting_over(step, lambda: self._train(step, notes))

    def _train(self, step: StepInput, notes: list[str]) -> StepLoss:
        """Compute and aggregate the gradient; returns the loss.

        Raises:
            StartOverError: on all workers, if the model of any of them has begun to draw random numbers, or the shards
                of any of them are to be examined again, which adds to `notes`.
        """
        assignment = step.assignment
        self._has_drawn = self._has_drawn_anew = False
        self._suspect = None
        if self._replica_sums is not None:
            self._replica_sums.begin_step()
        passed = self._compute(step) if self._pipeline is None else self._piped(self._pipeline, step)
        self._passes.norm.end_pass()
        layout = self.functions.layout(step.loss_name)
        sums, weights = self._sum_what_is_known(step, layout, passed, notes)
        result = StepLoss.of(sums, layout, notes)
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

    def _sum_what_is_known(
        self, step: StepInput, layout: LossLayout, passed: Passed, notes: list[str]
    ) -> tuple[Tensor, Sequence[float] | Tensor]:
        """The sums over workers that a step needs besides its gradients, in one message; returns those of the loss, and
        the weight in it of each replica and, last, of all workers' first passes together."""
        trained = [p for p in self.module.parameters() if p.requires_grad] if self._gradients_may_differ else []
        zero, norm = self._zero, self._passes.norm
        changed_in_pipeline = None if self._pipeline is None else self.forward_buffers.changed_now()
        facts = [
            self._has_drawn,
            self._has_drawn_anew,
            changed_in_pipeline is not None,
            self._suspect is not None,
        ]
        told = self._host_facts.begin(facts, self._uses(trained))
        losses = zero.new_zeros(layout.length) if passed.losses is None else passed.losses
        changed = torch.cat([zero.new_zeros(0), *self.forward_buffers.changed(losses)])
        weights = self._weights_to_add(step.assignment, losses, passed) if layout.is_weighted else zero.new_zeros(0)
        statistics = torch.cat([zero.new_zeros(0), *norm.collect(losses)])
        parts = [losses, weights, statistics, changed]
        summed = torch.cat(parts)
        if self._axes.data is not None:
            dist.all_reduce(summed, group=self._axes.data)
        losses, weights, statistics, changed = torch.split(summed, [len(part) for part in parts])
        if self._axes.pp is not None:
            # Only the last stage knows the loss; and norm layers of all stages move, or none.
            known = torch.cat([losses, weights, statistics.sum().view(1) * 0.0])
            dist.all_reduce(known, group=self._axes.pp)
            losses, weights, poison = torch.split(known, [layout.length, len(weights), 1])
            statistics = statistics + poison
        (somebody_draws, somebody_draws_anew, somebody_changes, somebody_suspects), uses = told()
        if somebody_changes:
            raise refused_in_pipeline(changed_in_pipeline or "of another stage")
        has_to_split = self._has_to_split(somebody_draws)
        if has_to_split or somebody_suspects:
            if self._replica_sums is not None:
                self._replica_sums.finish()  # other replicas may have begun more sums than this one
            if has_to_split:
                raise StartOverError(partial(self._passes.go_one_by_one, step.loss_name))
            raise StartOverError(partial(self._examine_again, step, self._suspect, notes, draws=somebody_draws_anew))
        norm.apply(*statistics.split(norm.lengths))
        self.forward_buffers.combine(changed, self._sum_moves, lambda values: broadcast(values, self._axes.data))
        _agree_on_gradients(trained, uses)
        if layout.is_weighted:
            return losses, weights
        num_samples = [self._samples_of_replica(step.assignment, one) for one in range(self._axes.mesh.dp)]
        return losses, [num / step.assignment.global_size for num in (*num_samples, passed.first_samples)]

    def _examine_again(self, step: StepInput, suspect: ShardRange | None, notes: list[str], *, draws: bool) -> None:
        """Examine shards that look new on any worker; a collective.

        Args:
            draws: whether some worker's shards drew random numbers in a new way.
        """
        if not draws or self._passes.expect_draws(step.loss_name):
            notes.extend(self._passes.find_coupling_again(step, self.module, suspect, in_step=True))

    def _weights_to_add(self, assignment: Assignment, losses: Tensor, passed: Passed) -> Tensor:
        """This worker's part of the weights of all replicas, and of those of all workers' first passes."""
        weights = losses.new_zeros(self._axes.mesh.dp + 1)
        weights[assignment.rank // self._axes.mesh.fsdp] = losses[1]
        weights[-1] = passed.first_weight
        return weights

    def _sum_moves(self, numbers: list[int]) -> Tensor:
        total = self.forward_buffers.moves(numbers)
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

    def _has_to_split(self, somebody_draws: bool) -> bool:
        """Whether the step has to start over because of random numbers."""
        if self._pipeline is not None:
            if somebody_draws:
                self._pipeline.carry_generators()
            return somebody_draws
        if self.functions.draws is None:  # all shards went one by one
            self.functions.draws = somebody_draws
            return False
        return somebody_draws

    def _compute(self, step: StepInput) -> Passed:
        """This worker's shards forward and backward."""
        assignment, passes = step.assignment, self._passes
        ranges = [passes.ranges(step, rank) for rank in range(len(assignment.shards_of_rank))]
        own = ranges[assignment.rank]
        # Collectives in forward and backward: all workers go through as many passes as the busiest one.
        num_passes = max(len(of_rank) for of_rank in ranges)
        passed = Passed()
        wants_norms = self._adds_up_every_pass and passes.tells_noise(step)
        for number in range(num_passes):
            self._spread.sync_gradients(self.module, False)
            if number == num_passes - 1:
                self._before_last_backward(self.module)
            if number < len(own):
                samples = passes.samples(step, own[number])
                is_new = passes.shows_new_values(step, own[number], samples)
                made = passes.compute_loss(step, self.module, own[number], samples)
                self._has_drawn |= made.has_drawn
                self._has_drawn_anew |= made.is_unexamined
                is_new |= made.is_unexamined | passes.shows_new_operations(step, own[number], made.loss)
                if is_new:
                    self._suspect = own[number]
                passed.add(made.loss)
                passes.backward(step, made.loss)
            else:
                with passes.stand_in(step, self.module) as stand_in:
                    stand_in.backward()
            self._spread.end_pass()
            if wants_norms and number == 0 and num_passes > 1:
                passed.first_sqr = self._spread.squared_norm()
                passed.first_samples = sum(sum(of_rank[0].sizes) for of_rank in ranges if of_rank)
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
        ranges = [self._passes.ranges(step, rank) for rank in range(len(assignment.shards_of_rank))]
        micro_batches = [micro_batch_of(self._passes, step, shards, passed.add) for shards in ranges[assignment.rank]]
        if self._axes.mesh.fsdp > 1:
            most = max(len(of_rank) for of_rank in ranges)
            micro_batches += [stand_in_batch(self._passes, step, self.module)] * (most - len(micro_batches))
        self._spread.sync_gradients(self.module, False)
        pipeline.train_step(micro_batches)
        self._has_drawn = pipeline.draws_unexpectedly
        return passed

    # --- the whole model ---

    def gradient_norms(self) -> list[Tensor]:
        return [self._spread.squared_norm().sqrt()]

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._spread.whole(tensors)

    # --- the rest of the contract ---

    def sync_buffers(self) -> bool:
        broadcast(unknown_buffers(self.module), self._axes.data)
        return True

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        super().load_state(shared, own)
        if self._pipeline is not None and self.functions.draws:
            self._pipeline.carry_generators()


def _agree_on_gradients(trained: Sequence[Tensor], are_used: Sequence[bool]) -> None:
    """A parameter that any worker used gets a gradient on all workers; one that no worker used gets none."""
    for parameter, is_used in zip(trained, are_used, strict=True):
        if not is_used:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
