"""A worker's virtual shards through the model, one by one: each is a call of the loss function and a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.containers import copied
from paceline.parallel.blocks import BlockSeeds, uncompiled_blocks
from paceline.parallel.buffers import Buffers, standing_in
from paceline.parallel.generators import seed_generators
from paceline.parallel.losses import LossLayouts, ShardLoss, counts, ignore_unless, read_loss, watching_outputs
from paceline.parallel.step_input import StepInput


class Passes:
    """Makes the forward and backward passes of one worker, or of one device of a worker."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        layouts: LossLayouts,
        like: Tensor,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """
        Args:
            like: a scalar of the dtype, and on the device, in which losses are added.
            blocks: those that draw by names of their own, by path in the whole model; None: found in the first pass,
                when it is known what is compiled.
        """
        self.model = model
        self.device = device
        self.layouts = layouts
        self.like = like
        self.buffers = Buffers(model)
        self.first_loss = like
        """The loss of this worker's first shard in the last step whose samples are needed again, a scalar."""
        self.seeds = BlockSeeds(device)
        self._blocks = blocks
        self._is_watching = False

    def forward(self, step: StepInput, shard: int) -> ShardLoss:
        """The loss of a shard of this worker's; `backward` has to follow before the next one."""
        self.enter(step, shard)
        loss = self.read(step, self.model, shard)
        self.leave(step, shard)
        if step.reads_again and shard == step.assignment.own[0]:
            self.first_loss = loss.mean.detach()
        return loss

    def enter(self, step: StepInput, shard: int) -> None:
        """Before a forward pass: the generators and buffers are those that the shard has on any worker."""
        if not self._is_watching:
            self.seeds.watch(uncompiled_blocks(self.model) if self._blocks is None else self._blocks)
            self._is_watching = True
        seed = step.shard_seed(shard)
        seed_generators(seed, self.device)
        self.seeds.begin_shard(seed)
        self.buffers.begin_pass()
        step.companions.begin_pass()

    def leave(self, step: StepInput, shard: int) -> None:
        """After a forward pass, before its backward pass: note what it made of buffers."""
        self.buffers.end_pass(shard, step.assignment.weight(shard))

    def read(self, step: StepInput, module: nn.Module, shard: int) -> ShardLoss:
        """Call the loss function with a shard's samples, and see what it returned."""
        samples = step.content(shard)
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

    def statistics(self, loss: ShardLoss) -> Tensor:
        """What is added up over all shards besides gradients: the sums of a shard's loss, then the moves of buffers."""
        return torch.cat([loss.sums, self.buffers.collect(loss.sums)]) if self.buffers.num_sums else loss.sums

    @contextmanager
    def stand_in(self, step: StepInput) -> Iterator[Tensor]:
        """The loss of a sample that counts for nothing, a scalar, for a worker that takes part in others' collectives.

        Its backward pass belongs inside.
        """
        with standing_in(self.model), step.companions.standing_in():
            yield step.scale(self.loss_of_nothing(step, self.model).weighted)

    def loss_of_nothing(self, step: StepInput, module: nn.Module) -> ShardLoss:
        """The loss of the worker's first shard with the weight 0, through which nothing flows back."""
        with watching_outputs(module) as outputs:
            loss = read_loss(step.loss_of(module, copied(step.batch.shards[0])), 0.0, 1, self.like)
        ignore_unless(False, outputs)
        return replace(loss, weight=0.0)
