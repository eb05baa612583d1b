"""`parity = "bitwise"`: every shard by itself, everything added in one fixed tree order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.tree_exact import TreeSum, tree_all_reduce
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import StepInput, check_loss, cut, statistics_dtype
from paceline.parallel.norm import NormStatistics, ShardBatchNorm, replace_batch_norm


class BitwiseDataParallel:
    """Bit for bit the same on any number of workers.

    Each virtual shard becomes one flat vector: its weighted loss, norm statistics and gradients. What a shard
    computes does not depend on who computes it, and `comm.tree_exact` adds the vectors in an order that does not
    depend on it either.
    """

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.module = replace_batch_norm(model, ShardBatchNorm)
        self._group = group
        self._clock = Clock(device)
        self._norm = NormStatistics(self.module)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._empty = torch.zeros(
            1 + self._norm.length + sum(p.numel() for p in self._parameters),
            dtype=statistics_dtype(self.module),
            device=device,
        )
        self._last_gradient = self._aggregated = self._clock.mark()
        if group is not None:
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                dist.broadcast(tensor.data, src=0, group=group)

    @property
    def communication(self) -> tuple[Mark, Mark]:
        return self._last_gradient, self._aggregated

    def gradients(self, step: StepInput) -> Tensor:
        share = step.share
        first, stop = share.runs[share.rank]
        self._norm.shards.all = share.all_sizes
        tree = TreeSum(first)
        for shard in range(first, stop):
            tree.push(self._leaf(step, shard))
        self._norm.shards.current = None
        self._last_gradient = self._clock.mark()
        total = tree_all_reduce(tree.partials, share.runs, self._empty, self._group)
        self._aggregated = self._clock.mark()

        loss, statistics, flat = total.tensor_split([1, 1 + self._norm.length])
        self._norm.apply(statistics)
        for parameter, grad in zip(self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(grad.view(parameter.shape))
        return loss.view(())

    def _leaf(self, step: StepInput, shard: int) -> Tensor:
        piece = step.share.piece(shard, max_samples=1)
        self._norm.shards.current = piece.sizes
        step.seed_shard(shard)
        for parameter in self._parameters:
            parameter.grad = None
        loss = check_loss(step.loss_of(self.module, cut(step.batch, piece.start, piece.stop)))
        step.scale(loss * piece.weight).backward()
        return torch.cat(
            [
                (loss.detach() * piece.weight).to(self._empty.dtype).view(1),
                *self._norm.collect(self._empty),
                *(
                    self._empty.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).to(self._empty.dtype)
                    for p in self._parameters
                ),
            ]
        )
