"""Conversions between full tensors and workers' shards: plain tensors or DTensors.

Plain tensors load nothing of DTensors, which takes long.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import Tensor, nn

from paceline.tensors import is_dtensor, shard_slice


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """All of `tensor` in its whole shape; a collective of the workers that hold its shards."""
    if not is_dtensor(tensor):
        return tensor.detach()
    from torch.distributed.tensor import DTensor, Replicate

    # A shard that is kept in host memory is sent from where the mesh computes.
    gathered = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    # Axis by axis, the outer first: torch warns where it has to find that order itself.
    for axis in range(gathered.device_mesh.ndim):
        placements = [Replicate() if one == axis else placed for one, placed in enumerate(gathered.placements)]
        gathered = gathered.redistribute(placements=placements)
    return gathered.to_local().detach()


def reshard(model: nn.Module) -> None:
    """Leave this worker its shards of the parameters that it has gathered."""
    if "torch.distributed.fsdp" in sys.modules:  # else nothing is sharded, and it takes long to load
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The full `tensor`, of the shape of `like`, sharded like it: a DTensor; no communication."""
    if not is_dtensor(like):
        return tensor
    offsets, sizes = shard_slice(like)
    mine = tensor[tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))]
    # A copy: a view would keep the full tensor in memory.
    return with_local(mine.to(like.device, copy=True), like)


def with_local(own: Tensor, like: Tensor) -> Tensor:
    """The tensor sharded like `like` whose shard on this worker is `own`."""
    if not is_dtensor(like):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_sharded(tensor: Tensor, axis: str) -> bool:
    """Whether workers along the mesh axis `axis` hold different shards of `tensor`, of any shape."""
    if not is_dtensor(tensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    # torch's own subclass of Shard for two axes on one dimension says no to is_shard().
    return any(
        name == axis and not placement.is_replicate() for name, placement in zip(names, tensor.placements, strict=True)
    )
