"""How the values of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

ALIGNMENT_BYTES = 64
"""Where torch lets host memory begin."""


def memory_order(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions as they lie in memory, outermost first, and the way back; random numbers are drawn in that order.

    A dropout behind an exchange, or in the next stage of a pipeline, draws the numbers of one device only if its input
    lies as it would there.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if not tensor.permute(order).is_contiguous():  # a view with gaps, or expanded: its copy has another order
        order = list(range(tensor.dim()))
    return order, inverse(order)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`: of [2, 0, 1] it is [1, 2, 0]."""
    return sorted(range(len(order)), key=order.__getitem__)
