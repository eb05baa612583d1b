"""Sharded, pipeline and tensor parallelism in any combination: the engine for all meshes but plain data parallelism.

The axes act on a model one after the other: it is cut into stages, the layers of a stage are sharded, then the
parameters of the layers. A step computes what one worker alone would: losses are weighted by samples, gradients are
sums over virtual shards, and no number of workers appears in any formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.comm import Aggregator
from paceline.object_collectives import gather_objects
from paceline.parallel.aggregation import set_up_aggregation
from paceline.parallel.assignment import Assignment, ShardRange
from paceline.parallel.axes import Axes
from paceline.parallel.clock import Clock
from paceline.parallel.dtensor import full_tensor, is_sharded, local_shard, rescale_gradients
from paceline.parallel.engine import Engine, Randomness, StepInput, broadcast, statistics_dtype
from paceline.parallel.forward_buffers import looking_at, refused_in_pipeline
from paceline.parallel.gradient_norms import GradientNorms, PartWeights, mean_of_squares, squared_norm
from paceline.parallel.initial_weights import initial_weights
from paceline.parallel.loss_functions import LossFunctions
from paceline.parallel.losses import Layout, StepLoss, ignore_unless, read_loss, watching_outputs
from paceline.parallel.micro_batch import MicroBatchLimit
from paceline.parallel.norm import ShardBatchNorm, replace_batch_norm, standing_in, unknown_buffers
from paceline.parallel.passes import DrewTogetherError, Passed, Passes
from paceline.parallel.pipeline import MicroBatch, ModelCall, Pipeline, stage_limits
from paceline.parallel.replica_sums import ReplicaSums
from paceline.parallel.sharded import recompute, shard, sharded_modules
from paceline.parallel.tensor import declared_plan, tensor_parallel
from paceline.partition import StageLimits
from paceline.spec import AlgorithmName, Job, Mesh, Plan


def _limits(job: Job, plan: Plan, mesh: Mesh, device: torch.device, example: ModelCall | None) -> StageLimits:
    """What a stage may hold: a GPU's memory. On CPUs no limit is known, since workers share the node's memory."""
    memory_bytes = math.inf if device.type != "cuda" else float(torch.cuda.mem_get_info(device)[1])
    given = () if example is None else (example.args, dict(example.kwargs))
    sizes = [len(leaf) for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()]
    return stage_limits(
        mesh,
        plan.pipeline,
        -(-job.virtual_shards // mesh.num_assignments),
        memory_bytes,
        optimizer_copies=job.optim.state_copies,
        micro_batch_share=-(-job.global_batch_size // job.virtual_shards) / max(sizes, default=1),
        recomputes=plan.recompute,
    )


class MeshParallel(Engine):
    """The model is sharded over a mesh; a step is equal on any mesh up to rounding.

    All workers of an fsdp axis go through the same collectives in every pass, so one with fewer shards than others
    computes stand-in samples that count for nothing. Whether the model draws random numbers is agreed at the end of a
    step: the first step goes shard by shard, and a step in which shards that went together drew any is made again.
    """

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
        self._may_skip = may_skip
        self._plan = plan
        self._device = device
        self._clock = Clock(device)
        if job.norm == "shard":
            model = replace_batch_norm(model, ShardBatchNorm)
        self._dtype = statistics_dtype(model)  # of all of it: a stage may have no parameter
        weights = initial_weights(model, axes.world)
        self._tensor_plan = declared_plan(model, plan.tensor_plan, axes.mesh.tp) if axes.mesh.tp > 1 else None
        self._pipeline: Pipeline | None = None
        if axes.pp is not None:
            with looking_at(model) as changed:
                self._pipeline = Pipeline(
                    model,
                    axes.pp,
                    plan.pipeline,
                    example,
                    device,
                    limits=_limits(job, plan, axes.mesh, device, example),
                    agreement=axes.world,
                    timeout_s=plan.timeout_s,
                    before_last_backward=self._before_last_backward,
                )
            if changed:
                raise refused_in_pipeline(changed[0])
            model = self._pipeline.module
        self.notes: list[str] = [] if self._pipeline is None else list(self._pipeline.notes)
        stages = [model] if self._pipeline is None else self._pipeline.stages
        for stage in stages:
            self._shard(stage)
        if self._pipeline is not None:
            self._pipeline.forget_example()
        self.module = model
        weights(model, device)
        self.randomness: Randomness = Randomness()
        self.functions = LossFunctions(axes.world)
        self.micro_batch = MicroBatchLimit(plan, job)
        self._passes = Passes(
            model,
            device,
            self.micro_batch,
            randomness=self.randomness,
            functions=self.functions,
            one_by_one=self._pipeline is not None or job.shard_by_shard,
        )
        self._passes.like = torch.zeros((), dtype=self._dtype, device=device)
        self.forward_buffers = self._passes.buffers
        self._has_drawn = False
        now = self._clock.mark()
        self.communication = now, now
        self._aggregator: Aggregator | None = None
        self._replica_sums: ReplicaSums | None = None
        self.algorithm: AlgorithmName = plan.algorithm
        if axes.dp is not None:
            self._aggregate_replicas(job, axes.dp, stages)
        if job.measure_noise and not (axes.mesh.dp > 1 or self._adds_up_every_pass):
            self.notes.append(f"the gradient noise scale is not measured under the strategy {axes.mesh}")
        model.register_forward_hook(self._after_evaluation)

    def _aggregate_replicas(self, job: Job, group: dist.ProcessGroup, stages: Sequence[nn.Module]) -> None:
        trained = [local_shard(parameter) for parameter in self.module.parameters() if parameter.requires_grad]
        of_axis = replace(self._plan, world_size=self._axes.mesh.dp)
        aggregation = set_up_aggregation(job, of_axis, self._device, group, trained)
        self._aggregator, self.algorithm = aggregation.aggregator, aggregation.algorithm
        self.notes += aggregation.notes
        shared = () if self._pipeline is None else self._pipeline.shared_parameters
        self._replica_sums = ReplicaSums(self.module, stages, shared, aggregation.aggregator, self._device)

    def _shard(self, stage: nn.Module) -> None:
        """Shard a stage's layers over the tp axis, then its parameters over the fsdp axis."""
        mesh, device_mesh, plan = self._axes.mesh, self._axes.device_mesh, self._plan
        if mesh.tp > 1:
            with looking_at(stage):
                applied = tensor_parallel(
                    stage, device_mesh["tp"], given=self._tensor_plan, sequence_parallel=plan.sequence_parallel
                )
            self.notes += [f"tensor plan: {'; '.join(str(applied).splitlines()) or 'none'}", *applied.notes]
        if plan.recompute:
            recompute(stage)
        if mesh.fsdp > 1:
            shard(stage, device_mesh["fsdp"], mesh.zero_stage, cpu_offload=plan.cpu_offload, may_skip=self._may_skip)

    def _after_evaluation(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        # No backward pass follows that would free the gathered parameters, and what comes next reads the shards.
        if not torch.is_grad_enabled():
            for sharded in sharded_modules(module):
                sharded.reshard()

    def close(self) -> None:
        if self._aggregator is not None:
            self._aggregator.scheduler.close()

    # --- a step ---

    def gradients(self, step: StepInput) -> StepLoss:
        if self._aggregator is not None:
            self._aggregator.scheduler.begin_step()
        notes = self._passes.find_coupling(step, self.module, in_step=True)
        return self._passes.starting_over(lambda: self._train(step, notes), step.assignment)

    def _train(self, step: StepInput, notes: Sequence[str]) -> StepLoss:
        """Compute and aggregate the gradient; returns the loss.

        Raises:
            DrewTogetherError: on all workers, if the model of any of them has begun to draw random numbers.
        """
        assignment = step.assignment
        self._has_drawn = False
        if self._replica_sums is not None:
            self._replica_sums.begin_step()
        passed = self._compute(step) if self._pipeline is None else self._piped(self._pipeline, step)
        self._passes.norm.shards.current = None
        layout = self.functions.layout(step.loss_name)
        sums, weights = self._sum_what_is_known(step, layout, passed)
        result = StepLoss.of(sums, layout, notes)
        last_gradient = self._clock.mark()
        num_replicas = sum(self._samples_of_replica(assignment, one) > 0 for one in range(self._axes.mesh.dp))
        replicas_sqr: Tensor | None = None
        if step.take_norms is not None and num_replicas > 1:  # one alone shows no noise
            replicas_sqr = self._squared_norm_of_replicas(weights.replicas, result.rescale)
        if self._replica_sums is not None:
            self._replica_sums.finish()
        self._sum_whole_gradients()
        rescale_gradients(self.module.parameters(), result.rescale)
        size = assignment.global_size
        if step.take_norms is not None and replicas_sqr is not None:
            step.take_norms(GradientNorms(replicas_sqr, size / num_replicas, self._squared_norm(), size))
        elif step.take_norms is not None and passed.first_sqr is not None:
            first_sqr = passed.first_sqr / weights.first_pass**2
            step.take_norms(GradientNorms(first_sqr, passed.first_samples, self._squared_norm(), size))
        self.communication = last_gradient, self._clock.mark()
        return result

    def _sum_what_is_known(self, step: StepInput, layout: Layout, passed: Passed) -> tuple[Tensor, PartWeights]:
        """The sums over workers that a step needs besides its gradients, in one message; returns those of the loss."""
        trained = [p for p in self.module.parameters() if p.requires_grad] if self._gradients_may_differ else []
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        losses = zero.new_zeros(layout.length) if passed.losses is None else passed.losses
        uses = torch.tensor([float(self._has_gradient(p)) for p in trained], dtype=losses.dtype, device=self._device)
        changed_in_pipeline = None if self._pipeline is None else self.forward_buffers.changed_now()
        draws = losses.new_tensor([float(self._has_drawn), float(changed_in_pipeline is not None)])
        changed = self.forward_buffers.changed(losses)
        weights = self._weights_to_add(step.assignment, losses, passed) if layout.is_weighted else zero.new_zeros(0)
        statistics = torch.cat([zero.new_zeros(0), *self._passes.norm.collect(losses)])
        parts = [losses, draws, uses, weights, statistics, changed]
        summed = torch.cat(parts)
        if self._axes.data is not None:
            dist.all_reduce(summed, group=self._axes.data)
        losses, draws, uses, weights, statistics, changed = torch.split(summed, [len(part) for part in parts])
        if self._axes.pp is not None:
            # Only the last stage knows the loss; and norm layers of all stages move, or none.
            known = torch.cat([losses, weights, statistics.sum().view(1) * 0.0, draws])
            dist.all_reduce(known, group=self._axes.pp)
            losses, weights, poison, draws = torch.split(known, [layout.length, len(weights), 1, len(draws)])
            statistics = statistics + poison
        somebody_draws, somebody_changes = (draws > 0).tolist()
        if somebody_changes:
            raise refused_in_pipeline(changed_in_pipeline or "of another stage")
        if self._must_start_over(somebody_draws):
            if self._replica_sums is not None:
                self._replica_sums.finish()  # other replicas may have begun more sums than this one
            raise DrewTogetherError
        self._passes.norm.apply(statistics)
        self.forward_buffers.combine(changed, self._sum_moves, lambda values: broadcast(values, self._axes.data))
        if trained:
            self._agree_on_gradients(trained, uses)
        if layout.is_weighted:
            return losses, PartWeights(weights[:-1], weights[-1])
        return losses, self._weights_of_samples(step.assignment, passed)

    def _weights_to_add(self, assignment: Assignment, losses: Tensor, passed: Passed) -> Tensor:
        """This worker's part of the weights of all replicas, and of those of all workers' first passes."""
        weights = losses.new_zeros(self._axes.mesh.dp + 1)
        weights[assignment.rank // self._axes.mesh.fsdp] = losses[1]
        weights[-1] = passed.first_weight
        return weights

    def _weights_of_samples(self, assignment: Assignment, passed: Passed) -> PartWeights:
        replicas = [self._samples_of_replica(assignment, one) for one in range(self._axes.mesh.dp)]
        return PartWeights(
            [num / assignment.global_size for num in replicas], passed.first_samples / assignment.global_size
        )

    def _sum_whole_gradients(self) -> None:
        """Add up over the fsdp axis what cannot be sharded along it: the gradients of parameters without dimensions."""
        if self._axes.mesh.fsdp > 1:
            whole = [p.grad for p in self.module.parameters() if p.dim() == 0 and p.grad is not None]
            if whole:
                total = torch.stack([local_shard(grad) for grad in whole])
                dist.all_reduce(total, group=self._axes.device_mesh.get_group("fsdp"))
                for grad, summed in zip(whole, total.unbind(), strict=True):
                    local_shard(grad).copy_(summed)

    def _sum_moves(self, numbers: list[int]) -> Tensor:
        total = self.forward_buffers.moves(numbers)
        if self._axes.data is not None:
            dist.all_reduce(total, group=self._axes.data)
        return total

    def _has_gradient(self, parameter: Tensor) -> bool:
        if parameter.grad is None:
            return False
        # Where a parameter may be unused, it was added up all the same, as zeros.
        return not self._may_skip or bool(local_shard(parameter.grad).any())

    def _agree_on_gradients(self, trained: Sequence[Tensor], uses: Tensor) -> None:
        """A parameter that any worker used gets a gradient on all workers; one that no worker used gets none."""
        if self._axes.mesh.tp > 1:
            dist.all_reduce(uses, group=self._axes.device_mesh.get_group("tp"))
        for parameter, num_uses in zip(trained, uses.tolist(), strict=True):
            if not num_uses:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def _gradients_may_differ(self) -> bool:
        """Whether workers may have gradients of different parameters."""
        return self._axes.dp is not None or self._may_skip

    def _samples_of_replica(self, assignment: Assignment, replica: int) -> int:
        degree = self._axes.mesh.fsdp
        of_workers = assignment.shards_of_rank[replica * degree :][:degree]
        return sum(sum(assignment.shard_sizes[start:stop]) for start, stop in of_workers)

    def _squared_norm_of_replicas(self, weights: Sequence[float] | Tensor, rescale: Tensor | None) -> Tensor:
        """The mean, by their weights, of the replicas' squared gradient norms before they are added up."""
        mesh = self._axes.mesh
        weight = weights[mesh.place(dist.get_rank(self._axes.world))["dp"]]
        # A replica holds weight * g, and is one of dp copies in the whole model's norm.
        if isinstance(weight, Tensor) and rescale is not None:
            one = torch.ones_like(weight)
            return self._squared_norm(mean_of_squares(one, weight) * mesh.dp * rescale)
        return self._squared_norm(mesh.dp / weight if weight else 0.0)

    def _must_start_over(self, somebody_draws: bool) -> bool:
        if self._pipeline is not None:
            if somebody_draws:
                self._pipeline.carry_generators()
            return somebody_draws
        if self.randomness.is_drawn is None:  # all shards went one by one
            self.randomness.is_drawn = somebody_draws
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
        for number in range(num_passes):
            self._sync_gradients(self.module, False)
            if number == num_passes - 1:
                self._before_last_backward(self.module)
            if number < len(own):
                loss, drew = passes.compute_loss(step, self.module, own[number])
                self._has_drawn |= drew
                passed.add(loss)
                passes.backward(step, loss)
            else:
                with passes.stand_in(step, self.module) as stand_in:
                    stand_in.backward()
            if number == 0 and num_passes > 1 and step.take_norms is not None and self._adds_up_every_pass:
                passed.first_sqr = self._squared_norm()
                passed.first_samples = sum(sum(of_rank[0].sizes) for of_rank in ranges if of_rank)
        return passed

    @property
    def _adds_up_every_pass(self) -> bool:
        """Whether gradients of all workers are in `.grad` after every pass."""
        mesh = self._axes.mesh
        return mesh.dp == mesh.pp == 1 and (mesh.fsdp == 1 or mesh.zero_stage > 1)

    def _sync_gradients(self, module: nn.Module, is_last: bool) -> None:
        """ZeRO 1 adds gradients up once a step, 2 and 3 after every pass."""
        if self._axes.mesh.zero_stage == 1:
            for sharded in sharded_modules(module):
                sharded.set_requires_gradient_sync(is_last, recurse=False)
                sharded.set_reshard_after_backward(is_last, recurse=False)

    def _before_last_backward(self, stage: nn.Module) -> None:
        self._sync_gradients(stage, True)
        if self._replica_sums is not None:
            self._replica_sums.await_last(stage)

    def _piped(self, pipeline: Pipeline, step: StepInput) -> Passed:
        """As `_compute`, through the stages; as many micro-batches as the workers it gathers parameters with."""
        assignment, passed = step.assignment, Passed()
        ranges = [self._passes.ranges(step, rank) for rank in range(len(assignment.shards_of_rank))]
        micro_batches = [self._micro_batch(step, shards, passed) for shards in ranges[assignment.rank]]
        if self._axes.mesh.fsdp > 1:
            most = max(len(of_rank) for of_rank in ranges)
            micro_batches += [self._stand_in_batch(step)] * (most - len(micro_batches))
        self._sync_gradients(self.module, False)
        pipeline.train_step(micro_batches)
        self._has_drawn = pipeline.draws_unexpectedly
        return passed

    def _micro_batch(self, step: StepInput, shards: ShardRange, passed: Passed) -> MicroBatch:
        @contextmanager
        def backward() -> Iterator[None]:
            # Layers may run again, and other shards were here meanwhile.
            self._passes.norm.shards.current = shards.sizes
            with self._passes.norm.backward():
                yield

        def loss_of(model: nn.Module) -> Tensor:
            loss = self._passes.read(step, model, shards)
            passed.add(loss)
            return loss.weighted

        return MicroBatch(
            loss_of=loss_of,
            before_forward=lambda: self._passes.enter(step, shards),
            within=step.within,
            backward=backward,
            scale=step.scale,
        )

    def _stand_in_batch(self, step: StepInput) -> MicroBatch:
        @contextmanager
        def within() -> Iterator[None]:
            with step.within(), standing_in(self.module):
                yield

        def loss_of(model: nn.Module) -> Tensor:
            with watching_outputs(model) as outputs:
                loss = read_loss(step.loss_of(model, step.batch.cut(0, 1)), 0.0, 1, self._passes.like).mean
            ignore_unless(False, outputs)
            return loss * 0.0

        return MicroBatch(loss_of=loss_of, within=within, backward=self._passes.norm.backward, scale=step.scale)

    # --- the whole model ---

    def gradient_norm(self) -> Tensor:
        return self._squared_norm().sqrt()

    def _squared_norm(self, factor: float | Tensor = 1.0) -> Tensor:
        """The squared norm of the whole model's gradient; shards that several workers hold count once. A collective.

        Args:
            factor: multiplies what this worker adds to the sum.
        """
        shards: dict[int, list[Tensor]] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                shards.setdefault(self._num_copies(name, parameter), []).append(local_shard(parameter.grad))
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        total = sum((squared_norm(tensors).to(zero.dtype) / copies for copies, tensors in shards.items()), zero)
        total = total * factor
        dist.all_reduce(total, group=self._axes.world)
        return total

    def _num_copies(self, name: str, parameter: Tensor) -> int:
        """How many workers hold the same shard of a parameter."""
        mesh = self._axes.mesh
        copies = mesh.dp
        for axis, degree in (("fsdp", mesh.fsdp), ("tp", mesh.tp)):
            copies *= 1 if is_sharded(parameter, axis) else degree
        return copies * (1 if self._pipeline is None else len(self._pipeline.shared_parameters.get(name, (0,))))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[Tensor, Tensor] = {}  # tied ones stay tied
        found: dict[str, Tensor] = {}
        place = self._axes.mesh.place(dist.get_rank(self._axes.world))
        keeps = place["dp"] == place["fsdp"] == place["tp"] == 0
        for name, tensor in tensors.items():
            if tensor not in gathered:
                all_of_it = full_tensor(tensor)
                gathered[tensor] = all_of_it.cpu() if keeps else all_of_it.new_empty(0)
            found[name] = gathered[tensor]
        if self._axes.pp is not None:
            stages = gather_objects(found, self._axes.pp)
            found = {name: tensor for stage in stages or [] for name, tensor in stage.items()}
        return found if dist.get_rank(self._axes.world) == 0 else {}

    # --- the rest of the contract ---

    @property
    def holds_all(self) -> bool:
        return False

    def sync_buffers(self) -> bool:
        broadcast(unknown_buffers(self.module), self._axes.data)
        return True

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        super().load_state(shared, own)
        if self._pipeline is not None and self.randomness.is_drawn:
            self._pipeline.carry_generators()
