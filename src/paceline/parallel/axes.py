"""A worker's process groups along the axes of a mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.parallel.dtensor import device_mesh_of
from paceline.spec import Mesh


@dataclass(frozen=True)
class Axes:
    """This worker's groups along a mesh; None on axes of degree 1."""

    mesh: Mesh
    device_mesh: DeviceMesh
    world: dist.ProcessGroup
    data: dist.ProcessGroup | None
    """The dp and fsdp axes together: workers among which the batch is divided."""
    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None


def open_axes(mesh: Mesh, device: torch.device, world: dist.ProcessGroup) -> Axes:
    """Open the process groups of a mesh; a collective of all workers."""
    device_mesh = device_mesh_of(mesh, device.type)
    data = None
    if mesh.num_assignments > 1:
        data = device_mesh["dp", "fsdp"]._flatten("data").get_group()
    return Axes(
        mesh,
        device_mesh,
        world,
        data,
        device_mesh.get_group("dp") if mesh.dp > 1 else None,
        device_mesh.get_group("pp") if mesh.pp > 1 else None,
    )
