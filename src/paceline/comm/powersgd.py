"""PowerSGD: the gradient of a matrix is sent as two thin factors.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019,
arXiv 1905.13727.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.comm.compressor import RESIDUAL, Bucket, Compressor, Sum, nan_if_not_finite, shared_generator

_FACTOR = "factor/"
"""Q' of the last step by parameter, the same on all workers."""


class PowerSGD(Compressor):
    """One step of subspace iteration per training step, begun where the last one ended.

    A parameter's gradient M (rows x columns: its first dimension x the rest) is sent as rank * (rows + columns) values
    instead of rows * columns. With orthonormal Q (columns x rank) of the step before, the workers w = 1 … n form

        P = orthonormal(sum of M_w Q)      Q' = sum of M_w^T P      sum of M_w ~ P Q'^T

    and M_w - P (M_w^T P)^T is the residual of worker w. All of it is linear in the sum of the gradients, so that up to
    rounding the result does not depend on the number of workers; it is exact if that sum has at most this rank.

    A bucket travels as two vectors: first what is not worth compressing (vectors, small matrices) together with all
    M Q, then all M^T P. The rounding error of a lossy wire format is not part of the residual.

    P and the product are computed by every worker for itself from equal numbers: equal bits need workers of one kind.
    """

    kept = (RESIDUAL, _FACTOR)

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        self._rank = rank
        self._seed = seed

    def aggregate(self, bucket: Bucket, total: Sum) -> None:
        compressed = [(name, part) for name, part in bucket.parts if self._pays(part)]
        if not compressed:
            total(bucket.values)
            return
        whole = [part for _, part in bucket.parts if not self._pays(part)]
        self.add_to(compressed)
        # Copies, because a product's last bits depend on where in memory its factors begin: a bucket's parts lie
        # elsewhere after a resume.
        matrices = [part.reshape(len(part), -1).clone() for _, part in compressed]

        factors = [self._factor(name, m) for (name, _), m in zip(compressed, matrices, strict=True)]
        first = [*whole, *(m @ _orthonormal(q) for m, q in zip(matrices, factors, strict=True))]
        sums, poison = _summed(first, total)
        left = [_orthonormal(p) for p in sums[len(whole) :]]

        mine = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        right, more_poison = _summed(mine, total)
        poison = poison + more_poison

        for part, summed in zip(whole, sums, strict=False):
            part.copy_(summed)
        for (name, part), m, p, own, before, q in zip(compressed, matrices, left, mine, factors, right, strict=True):
            self.remember(name, m.addmm_(p, own.T, alpha=-1).view(part.shape), poison)
            factor = self._state[_FACTOR + name] = torch.where(poison == 0, q, before)
            part.copy_((p @ factor.T).view(part.shape))
        bucket.values.add_(poison)

    def _pays(self, part: Tensor) -> bool:
        """Whether two factors are smaller than the whole."""
        return part.dim() >= 2 and self._rank * (len(part) + math.prod(part.shape[1:])) < part.numel()

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        """Where the iteration of this parameter goes on. To be made orthonormal, so that M Q is no larger than M is."""
        shape = (matrix.shape[1], self._rank)
        factor = self._state.get(_FACTOR + name)
        if factor is None or factor.shape != shape:
            factor = torch.randn(shape, generator=shared_generator(self._seed, name), dtype=torch.float64)
        return factor.to(matrix)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of (at least) what the columns span, or of anything if they are not finite.

    By Householder reflections: a column that is zero, or depends on those before it, is replaced by some other
    direction, which costs nothing and may find something.
    """
    basis: Tensor = torch.linalg.qr(columns.nan_to_num(0.0, 0.0, 0.0))[0]
    return basis


def _summed(tensors: list[Tensor], total: Sum) -> tuple[list[Tensor], Tensor]:
    """The sums of `tensors` over all workers, sent as one vector, and NaN if they are not all finite, else 0."""
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
    total(vector)
    pieces = vector.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)], nan_if_not_finite(vector)
