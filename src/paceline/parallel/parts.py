"""Whole tensors and the parts of them that workers hold: a parameter that is not whole on a worker is a DTensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.spec import Mesh
from paceline.spec.mesh import AXES


def device_mesh_of(mesh: Mesh, device_kind: str) -> DeviceMesh:
    """The workers on torch's own mesh, with an axis of each name; a common act of all workers."""
    return init_device_mesh(device_kind, tuple(mesh.degree(axis) for axis in AXES), mesh_dim_names=AXES)


def local(tensor: Tensor) -> Tensor:
    """What this worker holds of `tensor`; shares its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`; a common act of the workers that hold parts of it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    gathered = tensor
    # Axis by axis, the outer first: torch warns where it has to find that order itself.
    for axis in range(gathered.device_mesh.ndim):
        placements = [Replicate() if one == axis else placed for one, placed in enumerate(gathered.placements)]
        gathered = gathered.redistribute(placements=placements)
    return gathered.to_local().detach()


def slice_of(like: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where in the whole tensor a worker's part of it begins, and how long it is, along each dimension."""
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(offsets), tuple(sizes)


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a whole `tensor`, the part that a worker holds of `like`, in its manner; nothing travels."""
    if not isinstance(like, DTensor):
        return tensor
    offsets, sizes = slice_of(like)
    mine = tensor[tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))]
    # A copy: a view would keep the whole in memory.
    own = mine.to(like.device, copy=True)
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this worker holds of them."""
    return sum(mine.numel() * mine.element_size() for mine in map(local, tensors))


def is_sharded(tensor: Tensor, axis: str) -> bool:
    """Whether workers along the mesh axis `axis` hold different parts of `tensor`."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    # torch's own subclass of Shard for two axes on one dimension says no to is_shard().
    return any(
        name == axis and not placement.is_replicate() for name, placement in zip(names, tensor.placements, strict=True)
    )


def clip(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients down so that the whole model's, whose norm is `norm`, is at most `max_norm` long."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_ has it
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mine = local(parameter.grad)
            alike.setdefault((mine.device, mine.dtype), []).append(mine)
    for (device, dtype), gradients in alike.items():
        torch._foreach_mul_(gradients, factor.to(device, dtype))  # on a GPU one kernel for many
