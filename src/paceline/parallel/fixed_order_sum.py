"""`parity = "bitwise"`: every shard's gradient, loss and moves of buffers enter one fixed tree, whoever computes them.

Each virtual shard becomes one flat vector, which does not depend on the worker that computes it, and `comm.tree_exact`
adds the vectors in an order that does not depend on it either.

Where parameters are sharded over fsdp they are gathered, which copies them exactly, and a shard's gradients are whole.
A worker then keeps its shard of the sum, which the optimizer updates element by element. So parameters and optimizer
take a part of the memory, gradients all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.comm.buckets import dense_form, views
from paceline.comm.fixed_tree import TreeSum
from paceline.comm.links import Links, node_of_every_rank
from paceline.comm.tree_exact import tree_all_reduce
from paceline.heartbeat import inside
from paceline.parallel.layout import Layout, count_users, norm_of, squared_norm
from paceline.parallel.losses import ShardLoss
from paceline.parallel.step_input import Assignment, StepInput


class FixedOrderSum:
    """The sums of a step over all shards, equal bit for bit on any number of workers."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._links: Links | None = None
        if layout.data is not None:
            self._links = Links(layout.data, node_of_every_rank(layout.data), layout.device)
        self._named: dict[str, nn.Parameter] = {}
        self._forms: list[Tensor] = []
        """What shapes whole gradients have, and how they lie in memory."""
        self._norms: dict[str, Tensor] = {}
        """The norms of the step's whole gradients, by parameter."""
        self._total: Tensor | None = None
        self._free: list[Tensor] = []
        """Vectors in which no sum is kept. On CPUs they stay for the next step: the kernel gives new ones page by page,
        which takes longer than to fill them."""

    def close(self) -> None:
        """Nothing goes on between steps."""

    # --- the passes of a step ---

    def begin_step(self, step: StepInput) -> None:
        self._step = step
        named = {name: p for name, p in self._layout.module.named_parameters() if p.requires_grad}
        if named.keys() != self._named.keys():  # a user may have frozen some since the last step, or unfrozen them
            self._forms = [dense_form(parameter) for parameter in named.values()]
        self._named = named
        self._tree = TreeSum[Tensor](step.assignment.own[0])
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
        """Add the next shard, whose statistics `forward_made` had, to the tree; its gradients are multiplied by
        `weight`."""
        values = self._new_vector(len(self._statistics))
        flat, statistics, noise, num_users = self._split(values)
        is_used = [gradient is not None for gradient in gradients]
        self._are_used = [before or now for before, now in zip(self._are_used, is_used, strict=True)]
        if not all(is_used):
            flat.zero_()
        for gradient, place in zip(gradients, views(flat, self._forms), strict=True):
            if gradient is not None:
                place.copy_(gradient)
        statistics.copy_(self._statistics)
        noise.zero_()
        if self._step.take_norms is not None:
            noise[1] = weight
            noise[0] = torch.where(noise[1] > 0, squared_norm([flat], noise[0]) / noise[1], 0.0)
        count_users(num_users, is_used)
        self._free.extend(self._tree.push(values))

    def _new_vector(self, num_statistics: int) -> Tensor:
        """What a shard contributes to a step, or the sum of such; uninitialised."""
        length = sum(form.numel() for form in self._forms) + num_statistics + 2 + len(self._forms)
        while self._free:
            vector = self._free.pop()
            if len(vector) == length:
                return vector
        return self._layout.zero.new_empty(length)

    def _split(self, vector: Tensor) -> Sequence[Tensor]:
        """The parts of a vector: all gradients, times weights; the statistics; the squared norm of the gradient over
        its weight, and the weight; for each parameter the number of shards in which it has a gradient at all."""
        num_users, num_gradients = len(self._forms), sum(form.numel() for form in self._forms)
        lengths = [num_gradients, len(vector) - num_gradients - 2 - num_users, 2, num_users]
        return torch.split(vector, lengths)

    # --- the end of a step ---

    def finish(self, num_statistics: int) -> Tensor:
        """The sums of all shards' statistics, then of their noise where the step takes norms."""
        is_cpu = self._layout.device.type == "cpu"
        empty = self._new_vector(num_statistics)
        if not is_cpu:
            self._free.clear()  # memory for the sum over workers
        # The sum goes by messages, which are no collective that torch could tell the launcher about.
        with inside("the sum of gradients over workers"):
            shards_of_rank = self._step.assignment.shards_of_rank
            self._total = tree_all_reduce(self._tree.partials, shards_of_rank, empty, self._links)
        if is_cpu:  # not the sum: gradients are views of it
            self._free.extend(one for one in (*self._tree.partials, empty) if one is not self._total)
        _, statistics, noise, _ = self._split(self._total)
        # A copy: a script may keep the loss, and a view would keep all gradients in memory.
        return torch.cat([statistics, noise]) if self._step.take_norms is not None else statistics.clone()

    def leave_gradients(self, factor: Tensor | None) -> None:
        """Leave the sums of gradients, times a scalar, in `.grad` of every parameter that any shard used."""
        assert self._total is not None
        flat, _, _, num_users = self._split(self._total)
        if factor is not None:
            flat.mul_(factor)
        are_used = self._are_used
        if not all(are_used):  # other workers may have used a parameter that no shard here used
            are_used = num_users.gt(0).tolist()
        self._norms = {}
        # None, as in plain torch, if no worker used it: an optimizer decays even parameters with gradient zero.
        gradients = views(flat, self._forms)
        for (name, parameter), gradient, is_used in zip(self._named.items(), gradients, are_used, strict=True):
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
        left = {name: norm for name, norm in self._norms.items() if self._named[name].grad is not None}
        norm: Tensor = torch.linalg.vector_norm(self._layout.norms_of_all(left))
        return norm

    def measured(self, assignment: Assignment) -> tuple[int, int]:
        """The number of parts whose gradients' norms are measured, and of the samples in them."""
        return len(assignment.shard_sizes), assignment.global_size
