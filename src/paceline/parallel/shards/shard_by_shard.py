"""Virtual shards computed one by one, for engines in which a shard's gradient must not depend on the worker."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.parallel.batch_norm.norm import ShardBatchNorm, replace_batch_norm
from paceline.parallel.engine import StepInput
from paceline.parallel.loss.loss_functions import LossFunctions
from paceline.parallel.losses import LossLayout, ShardLoss, StepLoss
from paceline.parallel.shards.calls_without_trace import loss_of_stand_in
from paceline.parallel.shards.passes import Passes


class ShardByShard:
    """Computes the gradient and the statistics of single shards; the caller sums them.

    A shard's statistics are the sums of its loss and what its norm layers have seen, one flat vector; summed over the
    shards of a global batch they are the batch's loss and what moves the running statistics.
    """

    def __init__(self, model: nn.Module, device: torch.device, functions: LossFunctions) -> None:
        self.module = replace_batch_norm(model, ShardBatchNorm)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        functions.draws = True  # until it is known otherwise
        self._functions = functions
        self.passes = Passes(self.module, device, functions, one_by_one=True)
        self.buffers = self.passes.buffers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which losses and norm statistics are added."""
        return self.passes.like.dtype

    def num_statistics(self, layout: LossLayout) -> int:
        return layout.length + sum(self.passes.norm.lengths)

    def layout_of_stand_in(self, step: StepInput) -> LossLayout:
        """Which numbers the loss function returns, by a sample that leaves no trace."""
        layout = loss_of_stand_in(self.passes, step, self.module).layout
        self._functions.has_returned(step.loss_name, layout)
        return layout

    def compute(self, step: StepInput, shard: int) -> tuple[ShardLoss, Tensor]:
        """Leave the gradient of the weighted loss in `.grad` (None where there is none); return loss and statistics."""
        for parameter in self.parameters:
            parameter.grad = None
        shards = step.assignment.shard_range(shard, max_samples=1)
        # Copies, because a product's last bits depend on where in memory its factors begin, and a shard lies elsewhere
        # in the batch of another worker.
        with self.passes.norm.forgotten_after_error():
            samples = self.passes.samples(step, shards, copies=True)
            loss = self.passes.compute_loss(step, self.module, shards, samples).loss
            self.passes.backward(step, loss)
            return loss, torch.cat([loss.sums, *self.passes.norm.collect(loss.sums)])

    def stand_in(self, step: StepInput) -> None:
        """Go through the model with a sample that counts for nothing, because other workers wait for it there."""
        with self.passes.stand_in(step, self.module) as loss:
            loss.backward()

    def apply(self, statistics: Tensor, layout: LossLayout) -> StepLoss:
        """Move the running statistics by the sum over a batch's shards, [num_statistics(layout)]; return its loss."""
        losses, values, weights = statistics.split([layout.length, *self.passes.norm.lengths])
        self.passes.norm.apply(values, weights)
        return StepLoss.of(losses, layout)
