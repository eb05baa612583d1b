"""`parity = "bitwise"`: every shard is computed separately, and all sums use one fixed tree order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.tree_exact import TreeSum, tree_all_reduce
from paceline.parallel.assignment import Assignment
from paceline.parallel.clock import Clock
from paceline.parallel.engine import Engine, StepInput, broadcast
from paceline.parallel.gradient_norms import GradientNorms, mean_of_squares, squared_norm
from paceline.parallel.loss_functions import LossFunctions
from paceline.parallel.losses import Layout, StepLoss
from paceline.parallel.passes import ShardByShard


class BitwiseDataParallel(Engine):
    """The engine whose results are equal bit for bit on any number of workers.

    Each virtual shard becomes one flat vector: its statistics, for each parameter whether it has a gradient at all,
    the gradients, their squared norm (0 if it is not needed), and for each buffer whether it was changed. The vector of
    a shard does not depend on the worker that computes it, and `comm.tree_exact` adds the vectors in an order that does
    not depend on it either.
    """

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.functions = LossFunctions(group)
        self._shards = ShardByShard(model, device, self.functions)
        self.module = self._shards.module
        self._group = group
        self._clock = Clock(device)
        self._parameters = self._shards.parameters
        self._device = device
        self.forward_buffers = self._shards.buffers
        now = self._clock.mark()
        self.communication = now, now
        broadcast([*self.module.parameters(), *self.module.buffers()], group)

    def sync_buffers(self) -> bool:
        broadcast(self.module.buffers(), self._group)
        return True

    def gradients(self, step: StepInput) -> StepLoss:
        assignment = step.assignment
        first, stop = assignment.own
        self.forward_buffers.begin_step()
        # A user may have frozen some since the last step, or unfrozen them.
        self._parameters = self._shards.parameters = [p for p in self.module.parameters() if p.requires_grad]
        tree = TreeSum(first)
        used = [False] * len(self._parameters)
        for shard in range(first, stop):
            tree.push(self._leaf(step, shard))
            used = [before or p.grad is not None for before, p in zip(used, self._parameters, strict=True)]
        last_gradient = self._clock.mark()
        layout = self.functions.layout(step.loss_name)
        lengths = self._lengths(layout)
        empty = torch.empty(sum(lengths), dtype=self._shards.dtype, device=self._device)
        total = tree_all_reduce(tree.partials, assignment.shards_of_rank, empty, self._group)
        self.communication = last_gradient, self._clock.mark()

        statistics, users, flat, small_sqr, changed = total.split(lengths)
        result = self._shards.apply(statistics, layout)
        self.forward_buffers.combine(
            changed,
            lambda numbers: self._sum_moves(assignment, numbers),
            lambda values: broadcast(values, self._group),
        )
        if not all(used):  # other workers may have used a parameter that no shard here used
            used = users.gt(0).tolist()
        if result.rescale is not None:
            flat.mul_(result.rescale)
            small_sqr.mul_(result.rescale)
        grads = flat.split([p.numel() for p in self._parameters])
        for parameter, grad, is_used in zip(self._parameters, grads, used, strict=True):
            # None, as in plain torch, if no worker used it: an optimizer decays even parameters with gradient zero.
            parameter.grad = torch.empty_like(parameter).copy_(grad.view(parameter.shape)) if is_used else None
        if step.take_norms is not None and len(assignment.shard_sizes) > 1:
            num_samples = assignment.global_size
            small_batch = num_samples / len(assignment.shard_sizes)
            step.take_norms(GradientNorms(small_sqr.view(()), small_batch, squared_norm([flat]), num_samples))
        return result

    def _lengths(self, layout: Layout) -> list[int]:
        """Of the parts of a shard's vector."""
        num_gradients = sum(p.numel() for p in self._parameters)
        lengths = [self._shards.num_statistics(layout), len(self._parameters), num_gradients, 1]
        return [*lengths, len(self.forward_buffers)]

    def _leaf(self, step: StepInput, shard: int) -> Tensor:
        loss, statistics = self._shards.compute(step, shard)
        gradients = (p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in self._parameters)
        leaf = torch.cat(
            [
                statistics,
                statistics.new_tensor([p.grad is not None for p in self._parameters]),
                *(gradient.to(statistics.dtype) for gradient in gradients),
                statistics.new_zeros(1),
                self.forward_buffers.changed(statistics),
            ]
        )
        if step.take_norms is not None:
            # The leaf is the shard's gradient times its weight, so this is its squared norm times its weight.
            _, _, gradient, squared, _ = leaf.split(self._lengths(loss.layout))
            weight, whole = loss.weight, squared_norm([gradient])
            squared.copy_(mean_of_squares(whole, weight) if isinstance(weight, Tensor) else whole / weight)
        return leaf

    def _sum_moves(self, assignment: Assignment, numbers: list[int]) -> Tensor:
        """What the shards moved buffers by, added in the tree that their gradients are added in."""
        first, stop = assignment.own
        tree = TreeSum(first)
        for shard in range(first, stop):
            tree.push(self.forward_buffers.moves(numbers, shard))
        empty = torch.empty_like(self.forward_buffers.moves(numbers))
        return tree_all_reduce(tree.partials, assignment.shards_of_rank, empty, self._group)
