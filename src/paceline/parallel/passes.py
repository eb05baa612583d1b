"""A worker's virtual shards through the model, one by one: each is a call of the loss function and a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.containers import copied
from paceline.parallel.blocks import blocks_of
from paceline.parallel.buffers import Buffers, standing_in
from paceline.parallel.generators import BlockSeeds, seed_generators
from paceline.parallel.losses import LossLayouts, ShardLoss, ignore_unless, read_loss
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
        buffers: Buffers | None = None,
    ) -> None:
        """
        Args:
            like: a scalar of the dtype, and on the device, in which losses are added.
            blocks: those that draw by names of their own, by path in the whole model; None: all of `model`.
            buffers: what shards make of buffers is noted there; None: in those of `model`.
        """
        self.model = model
        self.device = device
        self.layouts = layouts
        self.like = like
        self.buffers = Buffers(model) if buffers is None else buffers
        self.first_loss = like
        """The loss of this worker's first shard in the last step whose samples are needed again, a scalar."""
        self.seeds = BlockSeeds(device, blocks_of(model) if blocks is None else blocks)
        self._outputs: list[Any] | None = None
        """What the model has returned in this pass, where the loss may count for nothing."""

        def keep_output(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if self._outputs is not None:
                self._outputs.append(output)

        # A function: `copy.deepcopy` of a model would copy the object of a bound method, with its process groups.
        model.register_forward_hook(keep_output)

    def forward(self, step: StepInput, shard: int) -> ShardLoss:
        """The loss of a shard of this worker's; `backward` has to follow before the next one."""
        self.enter(step, shard)
        loss = self.read(step, shard)
        self.leave(step, shard, loss)
        return loss

    def enter(self, step: StepInput, shard: int) -> None:
        """Before a forward pass: the generators and buffers are those that the shard has on any worker."""
        seed = step.shard_seed(shard)
        seed_generators(seed, self.device)
        self.seeds.begin_shard(seed)
        for one in (self.buffers, *step.companions):
            one.begin_pass()

    def leave(self, step: StepInput, shard: int, loss: ShardLoss | None) -> None:
        """After a forward pass, before its backward pass: note what it made of buffers, and the first shard's loss."""
        self.buffers.end_pass(shard, step.assignment.weight(shard))
        if loss is not None and step.reads_again and shard == step.assignment.own[0]:
            self.first_loss = loss.mean.detach()

    def read(self, step: StepInput, shard: int) -> ShardLoss:
        """Call the loss function with a shard's samples, and see what it returned."""
        weight, size = step.assignment.weight(shard), step.assignment.global_size
        loss, outputs = self._call(step, step.content(shard), weight, size)
        self.layouts.has_returned(step.loss_name, loss.layout)
        if isinstance(loss.weight, Tensor):
            ignore_unless(loss.weight != 0, outputs)
        return loss

    def _call(self, step: StepInput, content: Any, weight: float, size: int) -> tuple[ShardLoss, Sequence[Any]]:
        """The loss, and where that may count for nothing what the model has returned."""
        self._outputs = [] if weight == 0 or self.layouts.may_be_weighted(step.loss_name) else None
        try:
            loss = read_loss(step.loss_of(self.model, content), weight, size, self.like)
            return loss, self._outputs or ()
        finally:
            self._outputs = None

    def backward(self, step: StepInput, loss: ShardLoss) -> None:
        """Add the gradient of a shard's loss, times its weight, to `.grad`."""
        step.scale(loss.weighted).backward()
        self.seeds.end()

    def statistics(self, loss: ShardLoss) -> Tensor:
        """What is added up over all shards besides gradients: the sums of a shard's loss, then the moves of buffers."""
        moves = self.buffers.take_moves(loss.sums)
        return torch.cat([loss.sums, *moves]) if moves else loss.sums

    @contextmanager
    def stand_in(self, step: StepInput) -> Iterator[Tensor]:
        """The loss of a sample that counts for nothing, a scalar, for a worker that takes part in others' collectives.

        Its backward pass belongs inside.
        """
        with standing_in(self.model, *[one.model for one in step.companions]):
            for one in step.companions:
                one.begin_pass()
            yield step.scale(self.loss_of_nothing(step).weighted)

    def loss_of_nothing(self, step: StepInput) -> ShardLoss:
        """The loss of the worker's first shard with the weight 0, through which nothing flows back."""
        loss, outputs = self._call(step, copied(step.batch.shards[0]), 0.0, 1)
        ignore_unless(torch.zeros((), dtype=torch.bool, device=self.device), outputs)
        return replace(loss, weight=0.0, weighted=loss.weighted * 0)
