"""One virtual shard at a time: what comes out depends on the shard alone, never on who computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.parallel.engine import StepInput, check_loss, cut, statistics_dtype
from paceline.parallel.norm import NormStatistics, ShardBatchNorm, replace_batch_norm


class ShardByShard:
    """Computes the gradient and the statistics of single shards; whoever holds it adds them up.

    A shard's statistics are its weighted loss and what its norm layers have seen, one flat vector; summed over the
    shards of a global batch they are the batch's mean loss and what moves the running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = replace_batch_norm(model, ShardBatchNorm)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.dtype = statistics_dtype(self.module)
        self._norm = NormStatistics(self.module)
        self.num_statistics = 1 + self._norm.length

    def compute(self, step: StepInput, shard: int) -> Tensor:
        """Leave the gradient of the weighted loss in `.grad` (None where there is none); return the statistics."""
        piece = step.share.piece(shard, max_samples=1)
        self._norm.shards.all, self._norm.shards.current = step.share.all_sizes, piece.sizes
        step.seed_shard(shard)
        for parameter in self.parameters:
            parameter.grad = None
        # Copies, because a product's last bits depend on where in memory its factors begin, and a shard lies elsewhere
        # in the batch of another worker.
        batch = pytree.tree_map_only(Tensor, torch.clone, cut(step.batch, piece.start, piece.stop))
        loss = check_loss(step.loss_of(self.module, batch))
        with self._norm.backward():
            step.scale(loss * piece.weight).backward()
        self._norm.shards.current = None
        weighted = (loss.detach() * piece.weight).to(self.dtype).view(1)
        return torch.cat([weighted, *self._norm.collect(weighted)])

    def apply(self, statistics: Tensor) -> Tensor:
        """Move the running statistics by the sum over a batch's shards; return its mean loss, a scalar."""
        self._norm.apply(statistics[1:])
        return statistics[0]
