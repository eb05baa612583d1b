"""Norms of gradients before and after they are summed, from which gradient noise is measured without extra passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from paceline.parallel.assignment import Assignment
from paceline.parallel.dtensor import alike


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradients over fewer and over more samples; times the squared loss scale, if any."""

    small_sqr: Tensor
    """The mean over parts of the global batch before their gradients are summed, weighted by samples; a scalar."""
    small_batch: float
    """Mean number of samples per part: 1 / (weighted mean of 1 / samples), which is samples / parts."""
    large_sqr: Tensor
    """The squared norm of the gradient of the global batch; a scalar."""
    large_batch: float


TakeNorms = Callable[[GradientNorms], None]


# In float32 a sum over many millions of squares falls short by 0.3 %, which a small difference of norms cannot bear.
_CHUNK = 1 << 20

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _dense(gradient: Tensor) -> Tensor:
    """All values of a gradient that are not zero, at least, as real numbers: of a sparse one those that it holds."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all squares, a scalar; at least in float32."""
    sums = []
    for tensor in tensors:
        flat = _dense(tensor.detach()).reshape(-1)
        wide = flat if flat.dtype == torch.float64 else flat.float()
        sums += [torch.dot(chunk, chunk) for chunk in wide.split(_CHUNK)]
    return torch.stack(sums).sum()


def squared_gradient_norm(module: nn.Module) -> Tensor:
    """The squared norm of what is in `.grad` of a module's parameters, plain tensors; 0 without any."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return squared_norm(gradients or [torch.zeros_like(one) for one in islice(module.parameters(), 1)])


def norm_of_each(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient, of any shape, as scalars in their order; at least in float32."""
    dense = [_dense(one) for one in gradients]
    norms: dict[int, Tensor] = {}
    for (_, dtype), tensors in alike(dense).items():
        found = torch._foreach_norm(tensors, dtype=_WIDE.get(dtype))
        norms.update(zip(map(id, tensors), found, strict=True))
    return [norms[id(one)] for one in dense]


def norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of what these are the norms of the parts of, all scalars, on the device of the first."""
    if len(norms) == 1:
        return norms[0]
    whole: Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
    return whole


class WorkerNorms:
    """The norms of workers' gradients per step; each worker adds one number to a sum that is formed anyway.

    That sum starts before backward has filled the buckets, so a step's norms are known in the next step.
    """

    def __init__(self, zero: Tensor) -> None:
        """
        Args:
            zero: a scalar of the dtype and on the device in which the norms are added.
        """
        self._zero = zero
        self._nothing = zero.view(1)
        self._assignment: Assignment | None = None
        self._take: TakeNorms | None = None
        self._own_sqr = zero
        self._buckets: list[Tensor] = []
        self._summed_sqr: Tensor | None = None
        self._last: tuple[GradientNorms, TakeNorms] | None = None
        """The norms of the last step; `small_sqr` is this worker's contribution to the mean."""

    def begin(self, assignment: Assignment, take: TakeNorms | None) -> None:
        """Begin a step; `take` is called with its norms."""
        self._assignment = assignment
        # A single worker shows no noise.
        self._take = take if _num_busy_workers(assignment) > 1 else None
        self._own_sqr = self._zero
        self._buckets = []
        self._summed_sqr = None

    def forget_buckets(self) -> None:
        """Let the memory of the last step's buckets go, before there are others."""
        self._buckets = []

    def bucket_filled(self, values: Tensor) -> None:
        """Called with this worker's gradients times its weight, before they are replaced by their sum."""
        self._buckets.append(values)
        if self._take is not None:
            self._own_sqr = self._own_sqr + squared_norm([values])

    def squared_sum(self) -> Tensor:
        """The squared norm of the step's gradient, a scalar; computed once, when all buckets hold their sums."""
        if self._summed_sqr is None:
            self._summed_sqr = squared_norm(self._buckets)
        return self._summed_sqr

    @property
    def to_be_summed(self) -> Tensor:
        """The number, [1], to add over all workers before this step ends, whether or not norms are wanted."""
        return self._nothing if self._last is None else self._last[0].small_sqr.view(1)

    def end(self, small_sqr: Tensor, weight: float | Tensor, rescale: Tensor | None) -> None:
        """Report the last step's norms, which this sum completes, and keep those of the current step.

        Args:
            small_sqr: a scalar.
            weight, rescale: as of `mean_of_squares`; with a stand-in this worker has the weight 0.
        """
        if self._last is not None:
            norms, take = self._last
            take(replace(norms, small_sqr=small_sqr.view(())))
        self._last = None
        if self._take is not None and self._assignment is not None:
            own = mean_of_squares(self._own_sqr, weight, rescale)
            num_samples, num_busy = self._assignment.global_size, _num_busy_workers(self._assignment)
            norms = GradientNorms(own, num_samples / num_busy, self.squared_sum(), num_samples)
            self._last = norms, self._take


def mean_of_squares(squared: Tensor, weight: float | Tensor, rescale: Tensor | None = None) -> Tensor:
    """What a part of the global batch adds to the weighted mean of |g|^2, a scalar; 0 where it has no weight.

    Args:
        squared: the squared norm of weight * g.
        weight: of the part in the step's loss: of its samples, or of the units of a `Mean`.
        rescale: the factor from the sum of weighted parts to the gradient; None: 1.
    """
    if not isinstance(weight, Tensor):
        return squared / weight if weight else torch.zeros_like(squared)
    mean = torch.where(weight > 0, squared / weight, torch.zeros_like(squared))
    return mean if rescale is None else mean * rescale


def _num_busy_workers(assignment: Assignment) -> int:
    return sum(start < stop for start, stop in assignment.shards_of_rank)
