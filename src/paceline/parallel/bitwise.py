"""`parity = "bitwise"`: every shard by itself, everything added in one fixed tree order."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.tree_exact import TreeSum, tree_all_reduce
from paceline.parallel.clock import Clock, Mark
from paceline.parallel.engine import StepInput, broadcast, check_loss, cut, statistics_dtype
from paceline.parallel.norm import NormStatistics, ShardBatchNorm, replace_batch_norm


class BitwiseDataParallel:
    """Bit for bit the same on any number of workers.

    Each virtual shard becomes one flat vector: its weighted loss, norm statistics, for each parameter whether it has
    a gradient at all, and the gradients. What a shard
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
            1 + self._norm.length + len(self._parameters) + sum(p.numel() for p in self._parameters),
            dtype=statistics_dtype(self.module),
            device=device,
        )
        self._last_gradient = self._aggregated = self._clock.mark()
        broadcast([*self.module.parameters(), *self.module.buffers()], group)

    @property
    def communication(self) -> tuple[Mark, Mark]:
        return self._last_gradient, self._aggregated

    def agree_on_buffers(self) -> None:
        broadcast(self.module.buffers(), self._group)

    def gradients(self, step: StepInput) -> Tensor:
        share = step.share
        first, stop = share.runs[share.rank]
        self._norm.shards.all = share.all_sizes
        tree = TreeSum(first)
        used = [False] * len(self._parameters)
        for shard in range(first, stop):
            tree.push(self._leaf(step, shard))
            used = [before or p.grad is not None for before, p in zip(used, self._parameters, strict=True)]
        self._norm.shards.current = None
        self._last_gradient = self._clock.mark()
        total = tree_all_reduce(tree.partials, share.runs, self._empty, self._group)
        self._aggregated = self._clock.mark()

        loss, statistics, users, flat = total.split(
            [1, self._norm.length, len(self._parameters), sum(p.numel() for p in self._parameters)]
        )
        self._norm.apply(statistics)
        if not all(used):  # what no shard of this worker used, others may have
            used = users.gt(0).tolist()
        grads = flat.split([p.numel() for p in self._parameters])
        for parameter, grad, is_used in zip(self._parameters, grads, used, strict=True):
            # None as in plain torch where nobody used it: an optimizer would decay even what has gradient zero.
            parameter.grad = torch.empty_like(parameter).copy_(grad.view(parameter.shape)) if is_used else None
        return cast(Tensor, loss.view(()))

    def _leaf(self, step: StepInput, shard: int) -> Tensor:
        piece = step.share.piece(shard, max_samples=1)
        self._norm.shards.current = piece.sizes
        step.seed_shard(shard)
        for parameter in self._parameters:
            parameter.grad = None
        loss = check_loss(step.loss_of(self.module, cut(step.batch, piece.start, piece.stop)))
        with self._norm.backward():
            step.scale(loss * piece.weight).backward()
        return torch.cat(
            [
                (loss.detach() * piece.weight).to(self._empty.dtype).view(1),
                *self._norm.collect(self._empty),
                self._empty.new_tensor([p.grad is not None for p in self._parameters]),
                *(
                    self._empty.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).to(self._empty.dtype)
                    for p in self._parameters
                ),
            ]
        )
