"""`parity = "bitwise"`: every shard is computed separately, and all sums use one fixed tree order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import env
from paceline.comm.fixed_tree import TreeSum
from paceline.comm.links import Links, message_links
from paceline.comm.tree_exact import tree_all_reduce
from paceline.containers import on_device
from paceline.heartbeat import Heartbeat
from paceline.parallel.assignment import Assignment
from paceline.parallel.audit import audit
from paceline.parallel.clock import mark
from paceline.parallel.engine import Engine, StepInput, broadcast
from paceline.parallel.gradients.gradient_norms import GradientNorms, mean_of_squares, norm_of_each, squared_norm
from paceline.parallel.losses import LossLayout, LossLayouts, StepLoss
from paceline.parallel.passes import Passes


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
    users: Tensor
    """For each parameter the number of shards in which it has a gradient at all."""
    small_sqr: Tensor
    """The squared norm of a shard's gradient times its weight; 0 if it is not needed."""

    @classmethod
    def of(cls, values: Tensor, forms: Sequence[Tensor], lengths: Sequence[int]) -> Self:
        """
        Args:
            forms: tensors of the gradients' shapes and orders in memory.
            lengths: the lengths of the parts after `gradients`.
        """
        gradients, start = [], values.storage_offset()
        for form in forms:
            gradients.append(values.as_strided(form.shape, _dense_strides(form.shape, form.stride()), start))
            start += form.numel()
        return cls(values, gradients, *values.split(lengths))

    def fits(self, forms: Sequence[Tensor], lengths: Sequence[int]) -> bool:
        """Whether `of` would make a vector of the same parts, of the same shapes and strides, from these."""
        parts = (self.flat, self.statistics, self.users, self.small_sqr)
        return [len(part) for part in parts] == [*lengths] and all(
            gradient.shape == form.shape and gradient.stride() == _dense_strides(form.shape, form.stride())
            for gradient, form in zip(self.gradients, forms, strict=True)
        )


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions lie in memory in the order that `strides` give."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


@dataclass(frozen=True)
class Shard:
    """What one virtual shard contributes to this worker's part of the model."""

    gradients: Sequence[Tensor | None]
    """The gradient of each parameter times the shard's weight; None where it has none."""
    statistics: Tensor
    """The sums of its loss, and what it has moved buffers by."""
    weight: float | Tensor


class BitwiseDataParallel(Engine):
    """The engine whose results are equal bit for bit on any number of workers.

    Each virtual shard becomes one flat vector, `_Vector`, which does not depend on the worker that computes it, and
    `comm.tree_exact` adds the vectors in an order that does not depend on it either.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        layouts: LossLayouts | None = None,
    ) -> None:
        """
        Args:
            model: with equal weights on all workers.
            group: the workers that divide the virtual shards among them; None: this one alone.
            layouts: of those that train together; None: these are `group`.
        """
        super().__init__(model, device, layouts or LossLayouts(group))
        self.passes = Passes(model, device, self.layouts)
        self.buffers = self.passes.buffers
        self._dtype = self.passes.like.dtype
        self._group = group
        self._heartbeat = Heartbeat(env.path(env.HEARTBEAT))
        self._links: Links | None = None if group is None else message_links(group, device, timeout_s)
        self._parameters: Sequence[Tensor] = ()
        self._forms: Sequence[Tensor] = self._parameters
        self._zero = torch.zeros(1, dtype=self._dtype, device=device)
        self._free: list[_Vector] = []
        """Vectors in which no sum is kept. On CPUs they stay for the next step: the kernel gives new ones page by page,
        which takes longer than to fill them."""
        self._all_used = torch.ones(0)
        """What a shard in which every parameter has a gradient says of its users."""

    def gradients(self, step: StepInput) -> StepLoss:
        assignment = step.assignment
        # A user may have frozen some since the last step, or unfrozen them.
        parameters = self._parameters = self._trained()
        self._forms = self._forms_of(parameters)
        tree = TreeSum(assignment.own[0])
        vectors: dict[Tensor, _Vector] = {}
        used = [False] * len(parameters)

        def add(shard: Shard) -> None:
            nonlocal used
            vector = self._take_vector(len(shard.statistics))
            self._fill(vector, shard, wants_norm=step.take_norms is not None)
            vectors[vector.values] = vector
            self._free.extend(vectors[one] for one in tree.push(vector.values))
            used = [before or gradient is not None for before, gradient in zip(used, shard.gradients, strict=True)]

        self._compute(step, add)
        if self._device.type != "cpu":
            self._free.clear()  # memory for the sum over workers
        vectors = {partial: vectors[partial] for partial in tree.partials}
        last_gradient = mark(self._device)
        layout = self.layouts.of(step.loss_name)
        lengths = self._lengths(self._num_losses(layout) + self.buffers.num_sums)
        empty = torch.empty(sum(lengths), dtype=self._dtype, device=self._device)
        values = self._sum_over_workers(tree.partials, assignment, empty)
        self.communication = last_gradient, mark(self._device)

        total = vectors.pop(values, None) or _Vector.of(values, self._forms, lengths)
        if self._device.type == "cpu":
            self._free.extend(vectors.values())  # not the sum: gradients are views of it
        # A copy: a script may keep the loss, and a view would keep all gradients in memory.
        statistics = total.statistics.clone()
        losses, moved = statistics.split([self._num_losses(layout), self.buffers.num_sums])
        losses, moved = self._known_to_all(losses, moved, layout)
        result = StepLoss.of(losses, layout)
        self.buffers.combine(
            moved,
            lambda numbers: self._sum_moves(assignment, numbers),
            lambda values: broadcast(values, self._group),
        )
        if not all(used):  # other workers may have used a parameter that no shard here used
            used = total.users.gt(0).tolist()
        if result.rescale is not None:
            total.flat.mul_(result.rescale)
            total.small_sqr.mul_(result.rescale)
        # None, as in plain torch, if no worker used it: an optimizer decays even parameters with gradient zero.
        self._keep(
            [
                gradient.to(parameter.dtype) if is_used else None
                for parameter, gradient, is_used in zip(parameters, total.gradients, used, strict=True)
            ]
        )
        if step.take_norms is not None and len(assignment.shard_sizes) > 1:
            num_samples = assignment.global_size
            small_batch = num_samples / len(assignment.shard_sizes)
            small_sqr = total.small_sqr.view(()).clone()  # may be kept until the next step
            step.take_norms(GradientNorms(small_sqr, small_batch, squared_norm([total.flat]), num_samples))
        return result

    def audit(self, step: StepInput) -> None:
        audit(self.passes, step, self._group)

    def _trained(self) -> list[nn.Parameter]:
        """The parameters whose gradients this worker adds up."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _forms_of(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors of the shapes of their whole gradients."""
        return parameters

    def _compute(self, step: StepInput, add: Callable[[Shard], None]) -> None:
        """Call `add` with each of this worker's shards, in their order."""
        for number in range(*step.assignment.own):
            loss, statistics = self.passes.compute(step, self.module, number)
            add(Shard([parameter.grad for parameter in self._parameters], statistics, loss.weight))

    def _known_to_all(self, losses: Tensor, moved: Tensor, layout: LossLayout) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The sums of losses, and of what buffers were moved by, where only some workers know them; a collective."""
        return losses, moved

    def _keep(self, gradients: Sequence[Tensor | None]) -> None:
        """Leave what this worker needs of the global batch's gradients in `.grad`."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    # --- the norm ---

    def gradient_norms(self) -> list[Tensor]:
        """The norm of the norms of all parameters' gradients, a single scalar.

        A parameter without a gradient counts as 0, so that the number of norms, and with it the order in which they
        are added, does not change.
        """
        nothing = torch.zeros((), dtype=self._dtype, device=self._device)
        norms = [nothing if one is None else one.to(nothing) for one in self._norms()]
        return [torch.linalg.vector_norm(self._of_all(torch.stack(norms) if norms else nothing.view(1)))]

    def _norms(self) -> list[Tensor | None]:
        """The norm of each parameter's gradient."""
        return norms_of([parameter.grad for parameter in self.module.parameters()])

    def _of_all(self, norms: Tensor) -> Tensor:
        """The norms of all parameters of the model, 1-D, from those of this worker's parameters."""
        return norms

    # --- vectors ---

    def _lengths(self, num_statistics: int) -> list[int]:
        """Lengths of the parts of a vector."""
        num_gradients = sum(form.numel() for form in self._forms)
        return [num_gradients, num_statistics, len(self._forms), 1]

    def _num_losses(self, layout: LossLayout) -> int:
        """The number of sums of losses in a vector of this worker's."""
        return layout.length

    def _take_vector(self, num_statistics: int) -> _Vector:
        """For a shard, and for others when the sum has no more need of it."""
        lengths = self._lengths(num_statistics)
        while self._free:
            vector = self._free.pop()
            if vector.fits(self._forms, lengths):  # as it does unless other parameters are trained now
                return vector
        empty = torch.empty(sum(lengths), dtype=self._dtype, device=self._device)
        return _Vector.of(empty, self._forms, lengths)

    def _fill(self, vector: _Vector, shard: Shard, *, wants_norm: bool) -> None:
        """Write what a shard contributes."""
        usage = [gradient is not None for gradient in shard.gradients]
        places = [vector.statistics, vector.users, vector.small_sqr]
        written = [shard.statistics, self._users(usage), self._zero]
        if not all(usage):
            vector.flat.zero_()
        for gradient, place in zip(shard.gradients, vector.gradients, strict=True):
            if gradient is not None:
                places.append(place)
                written.append(gradient)
        torch._foreach_copy_(places, written)
        if wants_norm:
            # The vector holds the shard's gradient times its weight, so this is its squared norm times its weight.
            vector.small_sqr.copy_(mean_of_squares(squared_norm([vector.flat]), shard.weight))

    def _users(self, usage: Sequence[bool]) -> Tensor:
        """For each parameter whether a shard used it, as a number."""
        if not all(usage):  # there may be as many patterns as shards, so none is kept
            return on_device(usage, self._device, self._dtype)
        if len(self._all_used) != len(usage):
            self._all_used = torch.ones(len(usage), dtype=self._dtype, device=self._device)
        return self._all_used

    def _sum_moves(self, assignment: Assignment, numbers: list[int]) -> Tensor:
        """What the shards moved buffers by, added in the tree that their gradients are added in."""
        first, stop = assignment.own
        tree = TreeSum(first)
        for shard in range(first, stop):
            tree.push(self.buffers.moves(numbers, shard))
        empty = torch.empty_like(self.buffers.moves(numbers))
        return self._sum_over_workers(tree.partials, assignment, empty)

    def _sum_over_workers(self, partials: Sequence[Tensor], assignment: Assignment, empty: Tensor) -> Tensor:
        """The sum of all workers' partial sums; `empty` is a place for it."""
        # It goes by messages, which are no collective that torch could tell the launcher about.
        with self._heartbeat.inside("paceline", "the sum of gradients over workers"):
            return tree_all_reduce(partials, assignment.shards_of_rank, empty, self._links)


def norms_of(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The norm of each gradient, a scalar; None where there is no gradient."""
    every = list(gradients)
    present = [one for one in every if one is not None]
    norms = iter(norm_of_each(present))
    return [None if one is None else next(norms) for one in every]
