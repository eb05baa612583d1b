"""`parity = "bitwise"` with a model that is cut into stages, or sharded over the fsdp axis, and replicas of that.

The gradients of every virtual shard go into the tree of `bitwise.py`, so that every number is added as on one worker.

Along fsdp, parameters are gathered, which copies them exactly, and a shard's gradients are whole. A worker then keeps
its shard of the sum, which the optimizer updates element by element. So parameters and optimizer take a part of the
memory, gradients all of it.

Along tp, a worker does so with its parts of layers, whose sums inside depend on the tp degree and on nothing else.

Along pp, every shard is a micro-batch; a worker's tree has the gradients of its stages, none of which may share a
parameter with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.containers import on_device
from paceline.dtensor_type import local_shard
from paceline.parallel.audit import audit
from paceline.parallel.axes import Axes
from paceline.parallel.dtensor import is_sharded, part, reshard, shard_of_part
from paceline.parallel.engine import StepInput
from paceline.parallel.engines.bitwise import BitwiseDataParallel, Shard, norms_of
from paceline.parallel.engines.piped_passes import MicroBatch, micro_batch_of, stand_in_batch
from paceline.parallel.losses import LossLayout, LossLayouts, ShardLoss, StepLoss
from paceline.parallel.model_graph import ModelCall
from paceline.parallel.passes import Passes
from paceline.parallel.sharded import sharded_modules
from paceline.parallel.sharding.initial_weights import align
from paceline.parallel.sharding.spread_model import SpreadModel
from paceline.spec import Job, Plan

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


class BitwiseMesh(BitwiseDataParallel):
    """The engine of meshes whose results are equal, bit for bit, to those of one worker, or of one tp group."""

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
        """The arguments are `MeshParallel`'s."""
        self._axes = axes
        self._spread = SpreadModel(model, plan, device, axes, example, may_skip=may_skip, is_exact=True)
        self._pipeline = self._spread.pipeline
        self.notes = list(self._spread.notes)
        if axes.mesh.fsdp == 1:
            align(self._spread.module)
        if self._pipeline is not None and job.measure_noise:
            self.notes.append(f"the gradient noise scale is not measured under the strategy {axes.mesh}")
        self._keeps_gathered = axes.mesh.zero_stage == 1
        for sharded in sharded_modules(self._spread.module):
            sharded.set_requires_gradient_sync(False, recurse=False)
            sharded.set_reshard_after_backward(False, recurse=False)  # whole gradients are with whole parameters
        super().__init__(self._spread.module, device, axes.data, plan.timeout_s, LossLayouts(axes.world))
        self.passes.blocks = None if self._pipeline is None else self._pipeline.blocks
        self.passes.like = self._spread.zero  # of all of the model: a stage may have no parameter
        self._names: list[str] = []
        """The names of the parameters whose gradients this worker adds up."""
        self._norm_of: dict[Tensor, Tensor] = {}
        """The norms of the parameters' whole gradients."""

    def gradients(self, step: StepInput) -> StepLoss:
        if self._pipeline is not None:
            step = replace(step, take_norms=None)
        try:
            return super().gradients(replace(step, loss_of=self._spread.checked(step.loss_of)))
        finally:
            reshard(self.module)

    def audit(self, step: StepInput) -> None:
        if self._pipeline is None:
            audit(self.passes, step, self._axes.world, has_gradients=False)

    def _trained(self) -> list[nn.Parameter]:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._names = list(trained)
        return list(trained.values())

    def _forms_of(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        return [part(parameter) for parameter in parameters]

    def _compute(self, step: StepInput, add: Callable[[Shard], None]) -> None:
        # All workers of an fsdp axis gather in every pass, so each makes as many as the busiest one.
        of_ranks = [stop - start for start, stop in step.assignment.shards_of_rank]
        num_stand_ins = max(of_ranks) - of_ranks[step.assignment.rank] if self._axes.mesh.fsdp > 1 else 0
        if self._pipeline is not None:
            self._pipe(self._pipeline, step, num_stand_ins, add)
            return
        for number in range(*step.assignment.own):
            loss, statistics = self.passes.compute(step, self.module, number)
            add(Shard(self._take(self.module), statistics, loss.weight))
        for _ in range(num_stand_ins):
            with self.passes.stand_in(step, self.module) as stand_in:
                stand_in.backward()
            self._take(self.module)

    # --- a pipeline ---

    def _pipe(self, pipeline: Pipeline, step: StepInput, num_stand_ins: int, add: Callable[[Shard], None]) -> None:
        """Every stage finishes the micro-batches in their order, and so does a worker of several."""
        passes = self.passes
        num_stages = len(self._spread.stages)
        own = [_PipedShard(passes, step, one, num_stages, self._take, add) for one in range(*step.assignment.own)]
        nothing = replace(stand_in_batch(passes, step, self.module), after_backward=self._take)
        pipeline.train_step([*(one.micro_batch for one in own), *[nothing] * num_stand_ins], nothing)
        passes.seeds.end()

    def _known_to_all(self, losses: Tensor, moved: Tensor, layout: LossLayout) -> tuple[Tensor, Tensor]:
        if self._pipeline is None:
            return losses, moved
        if not len(losses):
            losses = moved.new_zeros(layout.length)
        dist.broadcast(losses, group_src=self._pipeline.rank_of_loss, group=self._axes.pp)
        poison = moved.sum() * 0  # buffers of all stages move, or none
        dist.all_reduce(poison, group=self._axes.world)
        return losses, moved + poison

    def _num_losses(self, layout: LossLayout) -> int:
        return layout.length if self._pipeline is None or self._pipeline.has_last_stage else 0

    # --- gradients ---

    def _take(self, stage: nn.Module) -> list[Tensor | None]:
        """The gradients that a pass has left in a stage, in the order of the names, which has no more of them then."""
        named = stage.named_parameters()
        found = {name: None if one.grad is None else local_shard(one.grad) for name, one in named}
        for parameter in stage.parameters():
            parameter.grad = None
        if not self._keeps_gathered:
            reshard(stage)
        return [found.get(name) for name in self._names]

    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        self._norm_of = {
            parameter: norm
            for parameter, norm in zip(self._parameters, norms_of(gradients), strict=True)
            if norm is not None
        }
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # Copies: a view would keep all gradients in memory.
            parameter.grad = None if gradient is None else shard_of_part(gradient, parameter).clone()

    def _norms(self) -> list[Tensor | None]:
        return [None if p.grad is None else self._norm_of.get(p) for p in self.module.parameters()]

    def _of_all(self, norms: Tensor) -> Tensor:
        if self._axes.mesh.tp > 1:
            norms = self._of_parts(norms)
        if self._pipeline is None:
            return norms
        every = norms.new_zeros(self._pipeline.num_parameters)
        places = [self._pipeline.places[name] for name, _ in self.module.named_parameters()]
        if places:
            every[on_device(places, self._device)] = norms
        dist.all_reduce(every, group=self._axes.pp)  # each is 0 on all workers but one
        return every

    def _of_parts(self, norms: Tensor) -> Tensor:
        """The norms of whole gradients from those of this worker's parts along tp, added in the order of ranks."""
        group = self._axes.device_mesh.get_group("tp")
        of_ranks = [torch.empty_like(norms) for _ in range(self._axes.mesh.tp)]
        dist.all_gather(of_ranks, norms, group=group)
        total = torch.zeros_like(norms)
        for one in of_ranks:
            total += one * one
        are_divided = [is_sharded(parameter, "tp") for parameter in self.module.parameters()]
        if not are_divided:
            return norms
        return torch.where(on_device(are_divided, self._device), total.sqrt(), norms)

    # --- the whole model ---

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._spread.whole(tensors)


class _PipedShard:
    """A virtual shard on its way through this worker's stages, as a micro-batch."""

    def __init__(
        self,
        passes: Passes,
        step: StepInput,
        number: int,
        num_stages: int,
        take: Callable[[nn.Module], list[Tensor | None]],
        add: Callable[[Shard], None],
    ) -> None:
        """
        Args:
            num_stages: how many this worker has.
            take: takes the gradients out of a stage.
            add: called when all stages have had theirs.
        """
        self._passes, self._num_left, self._take, self._add = passes, num_stages, take, add
        self._weight = step.assignment.weight(number)
        self._losses: list[Tensor] = []
        self._moved = passes.like.new_zeros(passes.buffers.num_sums)
        self._gradients: list[Tensor | None] = []
        self._inner = micro_batch_of(passes, step, number, self._take_loss)
        self.micro_batch: MicroBatch = replace(self._inner, within=self._within, after_backward=self._after_backward)

    def _take_loss(self, loss: ShardLoss) -> None:
        self._losses = [loss.sums]

    @contextmanager
    def _within(self) -> Iterator[None]:
        with self._inner.within():
            yield
        self._moved += self._passes.buffers.collect(self._moved)  # of other stages' layers nothing

    def _after_backward(self, stage: nn.Module) -> None:
        found = self._take(stage)
        before = self._gradients or [None] * len(found)
        self._gradients = [old if new is None else new for old, new in zip(before, found, strict=True)]
        self._num_left -= 1
        if self._num_left == 0:
            self._add(Shard(self._gradients, torch.cat([*self._losses, self._moved]), self._weight))
            self._gradients = []
