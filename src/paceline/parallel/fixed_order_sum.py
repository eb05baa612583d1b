"""`parity = "bitwise"`: every shard's gradient, loss and moves of buffers enter one fixed tree, whoever computes them.

Each virtual shard becomes one flat vector, which does not depend on the worker that computes it, and `comm.tree_exact`
adds the vectors in an order that does not depend on it either.

Where parameters are sharded over fsdp they are gathered, which copies them exactly, and a shard's gradients are whole.
A worker then keeps its shard of the sum, which the optimizer updates element by element. So parameters and optimizer
take a part of the memory, gradients all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from paceline.comm.fixed_tree import TreeSum
from paceline.comm.links import Links, message_links
from paceline.comm.tree_exact import tree_all_reduce
from paceline.containers import on_device
from paceline.heartbeat import Heartbeat
from paceline.parallel.assignment import Assignment
from paceline.parallel.gradient_norms import norm_of, squared_norm
from paceline.parallel.layout import Whole
from paceline.parallel.losses import ShardLoss
from paceline.parallel.running_sum import dense_strides
from paceline.parallel.step_input import StepInput


@dataclass(frozen=True)
class _Vector:
    """What a shard contributes to a step, or a sum of such, as one flat vector and its parts.

    A parameter's gradient has its shape, and its order in memory, as an optimizer's kernels want it.
    """

    values: Tensor
    gradients: Sequence[Tensor]
    flat: Tensor
    """All gradients."""
    statistics: Tensor
    """The shard's statistics, then its noise."""
    num_users: Tensor
    """For each parameter the number of shards in which it has a gradient at all."""

    @classmethod
    def of(cls, values: Tensor, forms: Sequence[Tensor]) -> Self:
        """
        Args:
            forms: tensors of the gradients' shapes and orders in memory.
        """
        sizes = [form.numel() for form in forms]
        lengths = [sum(sizes), len(values) - sum(sizes) - len(forms), len(forms)]
        flat, statistics, num_users = values.split(lengths)
        gradients = [
            one.as_strided(form.shape, dense_strides(form), one.storage_offset())
            for one, form in zip(flat.split(sizes), forms, strict=True)
        ]
        return cls(values, gradients, flat, statistics, num_users)


class FixedOrderSum:
    """The sums of a step over all shards, equal bit for bit on any number of workers."""

    def __init__(self, layout: Whole) -> None:
        self._layout = layout
        self._heartbeat = Heartbeat()
        self._links: Links | None = None
        if layout.data is not None:
            self._links = message_links(layout.data, layout.device)
        self._named: dict[str, nn.Parameter] = {}
        self._forms: list[Tensor] = []
        self._norms: dict[str, Tensor] = {}
        """Those of the step's whole gradients."""
        self._total: _Vector | None = None
        self._free: list[_Vector] = []
        """Vectors in which no sum is kept. On CPUs they stay for the next step: the kernel gives new ones page by page,
        which takes longer than to fill them."""

    def close(self) -> None:
        """Nothing goes on between steps."""

    # --- the passes of a step ---

    def begin_step(self, step: StepInput) -> None:
        self._step = step
        self._num_noise = 0 if step.take_norms is None else 2
        named = {name: p for name, p in self._layout.module.named_parameters() if p.requires_grad}
        if named.keys() != self._named.keys():  # a user may have frozen some since the last step, or unfrozen them
            self._free.clear()
            self._forms = [self._layout.form(parameter) for parameter in named.values()]
        self._named = named
        self._tree = TreeSum(step.assignment.own[0])
        self._vectors: dict[Tensor, _Vector] = {}
        self._are_used = [False] * len(named)

    def forward_made(self, statistics: Tensor, *, is_last: bool) -> None:  # noqa: ARG002 - summed with the gradients
        """After a shard's forward pass."""
        self._statistics = statistics

    def expect_last(self, stage: nn.Module) -> None:
        """Nothing is sent before the step's last backward pass is over."""

    def pass_made(self, number: int, loss: ShardLoss | None) -> None:  # noqa: ARG002 - all passes are alike
        """After a backward pass: push the shard's vector; of a stand-in without `loss`, forget what it has left."""
        gradients = self.take_gradients()
        if loss is not None:
            self.push(gradients, loss.weight)

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients that a pass has left in the parameters that are trained."""
        return self._layout.take_gradients(self._named)

    def push(self, gradients: Sequence[Tensor | None], weight: float | Tensor) -> None:
        """Add the next shard, whose statistics `forward_made` had, to the tree.

        Args:
            weight: of the shard, by which its gradients are multiplied.
        """
        vector = self._take_vector(len(self._statistics))
        is_used = [gradient is not None for gradient in gradients]
        self._are_used = [before or now for before, now in zip(self._are_used, is_used, strict=True)]
        if not all(is_used):
            vector.flat.zero_()
        for gradient, place in zip(gradients, vector.gradients, strict=True):
            if gradient is not None:
                place.copy_(gradient)
        vector.num_users.copy_(on_device(is_used, vector.values.device, vector.values.dtype))
        vector.statistics[: len(self._statistics)] = self._statistics
        if self._num_noise:
            vector.statistics[-2:] = self._noise_of(vector, weight)
        self._vectors[vector.values] = vector
        self._free.extend(self._vectors[one] for one in self._tree.push(vector.values))

    def _noise_of(self, vector: _Vector, weight: float | Tensor) -> Tensor:
        """The squared norm of the shard's gradient times its weight, and the weight."""
        zero = self._layout.zero
        weight = zero + weight
        # The vector holds the shard's gradient times its weight.
        squared = squared_norm([vector.flat], zero)
        return torch.stack([torch.where(weight > 0, squared / weight, zero), weight])

    def _take_vector(self, num_statistics: int) -> _Vector:
        length = self._length(num_statistics)
        while self._free:
            vector = self._free.pop()
            if len(vector.values) == length:
                return vector
        return _Vector.of(self._layout.zero.new_empty(length), self._forms)

    def _length(self, num_statistics: int) -> int:
        """Of a vector."""
        return sum(form.numel() for form in self._forms) + num_statistics + self._num_noise + len(self._forms)

    # --- the end of a step ---

    def finish(self, num_statistics: int) -> Tensor:
        """The sums of all shards' statistics, then of their noise where the step takes norms."""
        is_cpu = self._layout.device.type == "cpu"
        if not is_cpu:
            self._free.clear()  # memory for the sum over workers
        vectors = {partial: self._vectors[partial] for partial in self._tree.partials}
        empty = self._layout.zero.new_empty(self._length(num_statistics))
        values = self._sum_over_workers(self._tree, empty)
        self._total = vectors.pop(values, None) or _Vector.of(values, self._forms)
        if is_cpu:
            self._free.extend(vectors.values())  # not the sum: gradients are views of it
        self._vectors = {}
        # A copy: a script may keep the loss, and a view would keep all gradients in memory.
        return self._total.statistics.clone()

    def leave_gradients(self, factor: Tensor | None) -> None:
        """Leave the sums of gradients, times a scalar, in `.grad` of every parameter that any shard used."""
        assert self._total is not None
        if factor is not None:
            self._total.flat.mul_(factor)
        are_used = self._are_used
        if not all(are_used):  # other workers may have used a parameter that no shard here used
            are_used = self._total.num_users.gt(0).tolist()
        self._norms = {}
        # None, as in plain torch, if no worker used it: an optimizer decays even parameters with gradient zero.
        for (name, parameter), gradient, is_used in zip(
            self._named.items(), self._total.gradients, are_used, strict=True
        ):
            if is_used:
                self._layout.keep_gradient(parameter, gradient)
                self._norms[name] = norm_of(gradient)
        self._total = None
        self._layout.end_passes()

    def gradient_norm(self) -> Tensor:
        """The norm of the norms of all parameters' gradients, a scalar.

        A parameter without a gradient counts as 0, so that the number of norms, and with it the order in which they
        are added, does not change.
        """
        norm: Tensor = torch.linalg.vector_norm(self._layout.norms_of_all(self._norms))
        return norm

    def sum_moves(self, moves: Callable[[int | None], Tensor]) -> Tensor:
        """The sum over all shards of what `moves` returns, in the tree; see `Buffers.end_step`."""
        first, stop = self._step.assignment.own
        tree = TreeSum(first)
        for shard in range(first, stop):
            tree.push(moves(shard))
        return self._sum_over_workers(tree, torch.empty_like(moves(None)))

    def measured(self, assignment: Assignment) -> tuple[int, int]:
        """The number of parts whose gradients' norms are measured, and of the samples in them."""
        return len(assignment.shard_sizes), assignment.global_size

    def _sum_over_workers(self, tree: TreeSum, empty: Tensor) -> Tensor:
        """The sum of all workers' partial sums; `empty` is a place for it."""
        # It goes by messages, which are no collective that torch could tell the launcher about.
        with self._heartbeat.inside("the sum of gradients over workers"):
            return tree_all_reduce(tree.partials, self._step.assignment.shards_of_rank, empty, self._links)
