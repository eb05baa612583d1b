"""Buckets: tensors that are sent in one message, and the flat vectors in which they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.spec.algorithm import BUCKET_BYTES

FIRST_BUCKET_BYTES = 1 << 20
"""DistributedDataParallel's size of the first bucket, small so that the first message is sent early."""

Item = TypeVar("Item")


def buckets(
    items: Iterable[Item], kind_of: Callable[[Item], tuple[Hashable, int]], first_bytes: int = BUCKET_BYTES
) -> Iterator[list[Item]]:
    """Group consecutive items of one kind into buckets of `BUCKET_BYTES`, the first one of `first_bytes`.

    Args:
        kind_of: returns an item's kind, such as its dtype, and its size in bytes.
    """
    bucket: list[Item] = []
    kind: Hashable = None
    size_bytes, limit_bytes = 0, first_bytes
    for item in items:
        before, (kind, item_bytes) = kind, kind_of(item)
        if bucket and (size_bytes >= limit_bytes or kind != before):
            yield bucket
            bucket, size_bytes, limit_bytes = [], 0, BUCKET_BYTES
        bucket.append(item)
        size_bytes += item_bytes
    if bucket:
        yield bucket


def dense_form(tensor: Tensor) -> Tensor:
    """A tensor without values, of the same shape, whose dimensions lie in memory in the same order, without gaps."""
    return torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))


def views(flat: Tensor, forms: Sequence[Tensor]) -> list[Tensor]:
    """Slices of a flat vector, one after the other, as tensors of these dense forms."""
    pieces = flat.split([form.numel() for form in forms])
    return [
        piece.as_strided(form.shape, form.stride(), piece.storage_offset())
        for piece, form in zip(pieces, forms, strict=True)
    ]
