"""Norms of gradients, and what is measured with them: the gradient noise scale, without extra passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


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


def _dense(gradient: Tensor) -> Tensor:
    """All values of a gradient that are not zero, at least, as real numbers: of a sparse one those that it holds."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def squared_norm(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """The sum of all squares, a scalar at least in float32, on the device of `like`; 0 without tensors."""
    sums = [like.float() if like.dtype != torch.float64 else like]
    for tensor in tensors:
        flat = _dense(tensor.detach()).reshape(-1)
        wide = flat if flat.dtype == torch.float64 else flat.float()
        sums += [torch.dot(chunk, chunk).to(sums[0]) for chunk in wide.split(_CHUNK)]
    return torch.stack(sums).sum()


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of a gradient of any shape, a scalar; at least in float32."""
    dense = _dense(gradient)
    is_wide = dense.dtype in (torch.float32, torch.float64)
    norm: Tensor = torch.linalg.vector_norm(dense, dtype=None if is_wide else torch.float32)
    return norm
