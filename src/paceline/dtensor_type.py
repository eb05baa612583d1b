"""DTensors of torch: whether a tensor is one, and what of it this worker holds. Plain tensors load nothing of DTensors,
which takes as long as half of torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor; none can exist in a process that has not loaded their module."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_shard(tensor: Tensor) -> Tensor:
    """This worker's shard of `tensor`, in the shape of the shard, or all of a plain tensor; shares its memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def shard_slice(like: DTensor, shape: torch.Size | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets of this worker's shard in the full tensor, and its sizes, along each dimension.

    Args:
        shape: of the full tensor, if it is another than that of `like` and divided like it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape or like.shape, like.device_mesh, like.placements)
    return tuple(offsets), tuple(sizes)
