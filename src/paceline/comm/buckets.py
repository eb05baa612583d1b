"""Buckets: tensors that are sent in one message, the flat vectors in which they are, and their broadcast."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.object_collectives import device_of
from paceline.spec.algorithm import BUCKET_BYTES

FIRST_BUCKET_BYTES = 1 << 20
"""DistributedDataParallel's size of the first bucket, small so that the first message is sent early."""

Item = TypeVar("Item")


def buckets(
    items: Iterable[Item], kind_of: Callable[[Item], tuple[Hashable, int]], first_bytes: int = BUCKET_BYTES
) -> Iterator[list[Item]]:
    """Group consecutive items of one kind into buckets of `BUCKET_BYTES`, the first one of `first_bytes`. `kind_of`:
    returns an item's kind, such as its dtype, and its size in bytes."""
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


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast rank 0's values to all workers, in messages of about a bucket; a collective. Not of meta tensors, and
    not of sparse ones, whose sizes need not be alike.

    Tensors may be on any device: a model that no GPU can hold is still in host memory when it is made equal.
    """
    if group is None:
        return
    device = device_of(group)
    real = (tensor.detach() for tensor in tensors if not tensor.is_meta and tensor.layout == torch.strided)
    rooms: dict[torch.dtype, Tensor] = {}
    for bucket in buckets(real, lambda tensor: (tensor.dtype, tensor.nbytes)):
        lengths = [tensor.numel() for tensor in bucket]
        room = rooms.setdefault(bucket[0].dtype, bucket[0].new_empty(0, device=device))
        # In the same memory each time: what malloc keeps of a freed message does not always hold the next one.
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket], out=room.resize_(sum(lengths)))
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)  # backends lack some dtypes
        for tensor, values in zip(bucket, flat.split(lengths), strict=True):
            tensor.copy_(values.view(tensor.shape))
