"""A worker's virtual shards through the model, one by one: each is a call of the loss function and a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.containers import copied
from paceline.parallel.blocks import BlockSeeds, uncompiled_blocks
from paceline.parallel.buffers import Buffers, standing_in
from paceline.parallel.engine import StepInput, statistics_dtype
from paceline.parallel.generators import seed_generators
from paceline.parallel.losses import LossLayouts, ShardLoss, counts, ignore_unless, read_loss, watching_outputs


@dataclass
class Passed:
    """The results of this worker's passes in a step."""

    losses: Tensor | None = None
    """The sums of the worker's losses, 1-D; None if it has no sample, or not the last stage."""
    first_weight: float | Tensor = 0.0
    first_sqr: Tensor | None = None
    """The squared norm of the gradient of all workers' first passes, if gradient noise can be measured by it."""
    first_samples: int = 0
    """The number of samples that `first_sqr` is the gradient of."""

    def add(self, loss: ShardLoss) -> None:
        if self.losses is None:
            self.first_weight = loss.weight
        self.losses = loss.sums if self.losses is None else self.losses + loss.sums


class Passes:
    """Makes the forward and backward passes of one worker, or of one device of a worker."""

    def __init__(self, model: nn.Module, device: torch.device, layouts: LossLayouts) -> None:
        self.model = model
        self.device = device
        self.layouts = layouts
        self.buffers = Buffers(model)
        self.like = torch.zeros((), dtype=statistics_dtype(model), device=device)
        """A tensor of the dtype, and on the device, in which losses are added."""
        self.first_loss = self.like
        """The loss of this worker's first shard in the last step, a scalar."""
        self.seeds = BlockSeeds(device)
        self.blocks: Mapping[str, nn.Module] | None = None
        """The blocks that draw by names of their own, by path in the whole model; None: found in the first pass, when
        it is known what is compiled."""
        self._is_watching = False

    def losses(self, step: StepInput, module: nn.Module) -> Iterator[tuple[int, ShardLoss]]:
        """A forward pass over each of this worker's shards; `backward` has to follow before the next one."""
        for shard in range(*step.assignment.own):
            yield shard, self.forward(step, module, shard)

    def forward(self, step: StepInput, module: nn.Module, shard: int) -> ShardLoss:
        """The loss of a shard of this worker's."""
        self.enter(step, shard)
        loss = self.read(step, module, shard)
        self.buffers.end_forward(shard, step.assignment.weight(shard))
        if shard == step.assignment.own[0]:
            self.first_loss = loss.mean.detach()
        return loss

    def enter(self, step: StepInput, shard: int) -> None:
        """Before a forward pass: the generators and buffers are those that the shard has on any worker."""
        if not self._is_watching:
            self.seeds.watch(uncompiled_blocks(self.model) if self.blocks is None else self.blocks)
            self._is_watching = True
        seed = step.shard_seed(shard)
        seed_generators(seed, self.device)
        self.seeds.begin_shard(seed)
        self.buffers.begin_pass()
        step.companions.begin_pass()

    def read(self, step: StepInput, module: nn.Module, shard: int) -> ShardLoss:
        """Call the loss function with a shard's samples, and see what it returned.

        They are copies: it may change them in place and be called again, and a product's last bits depend on where in
        memory its factors begin, which is elsewhere in the batch of another worker.
        """
        samples = copied(step.batch.cut(*step.assignment.span_of(shard)))
        with watching_outputs(module) if self.layouts.may_be_weighted(step.loss_name) else nullcontext() as outputs:
            returned = step.loss_of(module, samples)
        loss = read_loss(returned, step.assignment.weight(shard), step.assignment.global_size, self.like)
        self.layouts.has_returned(step.loss_name, loss.layout)
        if outputs is not None:
            ignore_unless(counts(loss), outputs)
        return loss

    def backward(self, step: StepInput, loss: ShardLoss) -> None:
        """Add the gradient of a shard's loss, times its weight, to `.grad`."""
        step.scale(loss.weighted).backward()
        self.seeds.end()

    def compute(self, step: StepInput, module: nn.Module, shard: int) -> tuple[ShardLoss, Tensor]:
        """Leave the gradient of one shard's weighted loss in `.grad`, None where there is none.

        Returns:
            The loss, and the shard's statistics, which are added up over all shards: the sums of its loss, then what
            `Buffers.collect` returns.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.forward(step, module, shard)
        self.backward(step, loss)
        return loss, torch.cat([loss.sums, self.buffers.collect(loss.sums)])

    @contextmanager
    def stand_in(self, step: StepInput, module: nn.Module) -> Iterator[Tensor]:
        """The loss of a sample that counts for nothing, a scalar, for a worker that takes part in others' collectives.

        Its backward pass belongs inside.
        """
        with standing_in(self.model), step.companions.standing_in():
            yield step.scale(self.loss_of_nothing(step, module).weighted)

    def loss_of_nothing(self, step: StepInput, module: nn.Module) -> ShardLoss:
        """The loss of the first samples with the weight 0, through which nothing flows back."""
        samples = copied(step.batch.cut(0, self.num_stand_ins(step)))
        with watching_outputs(module) as outputs:
            loss = read_loss(step.loss_of(module, samples), 0.0, 1, self.like)
        ignore_unless(False, outputs)
        return replace(loss, weight=0.0)

    def num_stand_ins(self, step: StepInput) -> int:
        """How many samples stand in: two, if the first shard has so many; a loss that compares samples may need another
        one."""
        return min(2, *step.assignment.sizes[:1], 1 if step.any_shard else 2)
