"""How many bytes a worker sends along each axis of a mesh in one step.

A ring makes each of n workers send 2 (n - 1)/n S to sum S bytes, and half of that to gather or to scatter them
(Patarasuk and Yuan 2009). Gloo scatters a sum as it sums: twice as much as here, which is what NCCL does.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.spec import Mesh
from paceline.spec.mesh import AxisName


def sum_bytes(size_bytes: float, num_workers: int) -> float:
    return 2 * (num_workers - 1) / num_workers * size_bytes


def gather_bytes(size_bytes: float, num_workers: int) -> float:
    """Of a gather that ends, or a scatter that begins, with `size_bytes` on every worker."""
    return (num_workers - 1) / num_workers * size_bytes


def padded_bytes(shapes: Sequence[tuple[int, ...]], width: int, num_workers: int) -> int:
    """Bytes of parameters as fully_shard gathers them: rows filled up to a multiple of the workers.

    Args:
        width: bytes of a number.
    """
    total = 0
    for rows, *rest in (shape or (1,) for shape in shapes):
        row = 1
        for length in rest:
            row *= length
        total += -(-rows // num_workers) * num_workers * row * width
    return total


def sharding_bytes(parameter_bytes: float, mesh: Mesh, num_passes: int) -> float:
    """Along fsdp: parameters are gathered and gradients scattered (Rajbhandari et al. 2020, section 7).

    Stage 1 does both once a step, stage 2 in every pass, and stage 3 gathers again for backward.

    Args:
        parameter_bytes: of a worker's tensor part of its stage, `padded_bytes`.
    """
    times = {1: 2, 2: 2 * num_passes, 3: 3 * num_passes}[mesh.zero_stage]
    return times * gather_bytes(parameter_bytes, mesh.fsdp)


def sent_bytes(
    mesh: Mesh, parameter_bytes: float, tensor_sum_bytes: float, message_bytes: float, num_passes: int
) -> dict[AxisName, float]:
    """Of the worker that sends most.

    Args:
        parameter_bytes: of a worker's tensor part of its stage, before it is sharded.
        tensor_sum_bytes: what a tensor group sums in one pass through a stage, forward and backward.
        message_bytes: of a micro-batch between two stages, in one direction; an inner stage sends it both ways.
    """
    ends = (mesh.pp > 1) + (mesh.pp > 2)
    return {
        "pp": ends * message_bytes * num_passes,
        "dp": sum_bytes(parameter_bytes / mesh.fsdp, mesh.dp),
        "fsdp": sharding_bytes(parameter_bytes, mesh, num_passes),
        "tp": num_passes * sum_bytes(tensor_sum_bytes, mesh.tp),
    }
