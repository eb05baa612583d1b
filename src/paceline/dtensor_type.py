"""DTensors of torch: whether a tensor is one, and what of it this worker holds. Plain tensors load nothing of DTensors,
which takes as long as half of torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor; none can exist in a process that has not loaded their module."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_shard(tensor: Tensor) -> Tensor:
    """This worker's shard of `tensor`, in the shape of the shard, or all of a plain tensor; shares its memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def shard_slice(like: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets of this worker's shard in the full tensor, and its sizes, along each dimension."""
    (chunk,) = like.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)
