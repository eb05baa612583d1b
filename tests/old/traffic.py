"""How many bytes a worker sends along each axis of a mesh in one step, and a node to other nodes.

A ring makes each of n workers send 2 (n - 1)/n S to sum S bytes, and half of that to gather or to scatter them
(Patarasuk and Yuan 2009). Gloo has no scatter of a sum: it sums, and every worker keeps its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from paceline.parallel.tensor import TensorPlan
from paceline.parallel.tensor.exchange import rows_to_send
from paceline.parallel.tensor.plan import num_blocks
from paceline.plan.search import Backend, num_gathers_and_scatters
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


def bytes_per_pass(plan: TensorPlan, model: nn.Module, rank: int, itemsize: int) -> float:
    """Bytes that a worker sends along tp for each forward and backward, however many samples.

    They are rows of weights that change workers to become heads, and the gradients of norms on own positions.
    """
    n = plan.degree
    total = 0.0
    for name, entry in plan.entries.items():
        module: Any = model.get_submodule(name)
        if "sequence_parallel" in entry:
            total += 2 * (n - 1) / n * sum(p.numel() for p in module.parameters() if p.requires_grad)
        blocks = 3 if "attention" in entry else num_blocks(entry)
        if blocks > 1:
            prefix = "in_proj_" if "attention" in entry else ""
            num_rows, num_columns = getattr(module, f"{prefix}weight").shape
            counts = rows_to_send(num_rows, blocks, n)
            forward = sum(counts[rank]) - counts[rank][rank]
            backward = sum(row[rank] for row in counts) - counts[rank][rank]
            has_bias = getattr(module, f"{prefix}bias") is not None
            total += (forward + backward) * (num_columns + has_bias)
    return total * itemsize


def scatter_bytes(size_bytes: float, num_workers: int, backend: Backend) -> float:
    """Of a sum of `size_bytes`, of which every worker gets a part."""
    return (sum_bytes if backend == "gloo" else gather_bytes)(size_bytes, num_workers)


def sharding_bytes(parameter_bytes: float, mesh: Mesh, num_passes: int, backend: Backend = "nccl") -> float:
    """Along fsdp.

    Args:
        parameter_bytes: of a worker's tensor part of its stage, `padded_bytes`.
    """
    num_gathers, num_scatters = num_gathers_and_scatters(mesh.zero_stage, num_passes)
    gathered = num_gathers * gather_bytes(parameter_bytes, mesh.fsdp)
    return gathered + num_scatters * scatter_bytes(parameter_bytes, mesh.fsdp, backend)


def sent_bytes(
    mesh: Mesh,
    parameter_bytes: float,
    tensor_sum_bytes: float,
    message_bytes: float,
    num_passes: int,
    backend: Backend = "nccl",
    *,
    stages_per_worker: int = 1,
    tied_bytes: float = 0.0,
) -> dict[AxisName, float]:
    """Of the worker that sends most.

    Args:
        parameter_bytes: of a worker's tensor part of its stages, before it is sharded: `padded_bytes`.
        tensor_sum_bytes: what a tensor group sums in one pass through a stage, forward and backward.
        message_bytes: of a micro-batch between two stages, in one direction; an inner stage sends it both ways.
        tied_bytes: of gradients that the first stage and the last exchange when backward is over.
    """
    # The first stage and the last have one neighbour each, all others two.
    inner = 2 * stages_per_worker * message_bytes * num_passes * (mesh.pp > 2)
    outer = ((2 * stages_per_worker - 1) * message_bytes * num_passes + tied_bytes) * (mesh.pp > 1)
    return {
        "pp": max(inner, outer),
        "dp": sum_bytes(parameter_bytes / mesh.fsdp, mesh.dp),
        "fsdp": sharding_bytes(parameter_bytes, mesh, num_passes, backend),
        "tp": num_passes * sum_bytes(tensor_sum_bytes, mesh.tp),
    }


def node_bytes(
    mesh: Mesh, sent: Sequence[Mapping[AxisName, float]], message_bytes: Sequence[float], devices_per_node: int
) -> float:
    """What the node that sends most to other nodes sends them, where groups sum and gather by rings of their ranks.

    Args:
        sent: by every worker of a pipeline, along dp, fsdp and tp: `sent_bytes` of its stage.
        message_bytes: over each boundary between stages in a step, in one direction; gradients go back as they came.
    """
    leaving = [0.0] * -(-mesh.num_workers // devices_per_node)
    strides: dict[AxisName, int] = {"tp": 1, "fsdp": mesh.tp, "dp": mesh.tp * mesh.fsdp}
    stage_size = mesh.tp * mesh.num_assignments
    for rank in range(mesh.num_workers):
        place = mesh.place(rank)
        for axis, stride in strides.items():
            is_last = place[axis] == mesh.degree(axis) - 1
            following = rank + stride * (1 - mesh.degree(axis) * is_last)
            if following // devices_per_node != rank // devices_per_node:
                leaving[rank // devices_per_node] += sent[place["pp"]][axis]
    for boundary, size_bytes in enumerate(message_bytes):
        giver, taker = boundary % mesh.pp * stage_size, (boundary + 1) % mesh.pp * stage_size
        for rank in range(stage_size):
            ends = (giver + rank) // devices_per_node, (taker + rank) // devices_per_node
            if ends[0] != ends[1]:
                leaving[ends[0]] += size_bytes
                leaving[ends[1]] += size_bytes
    return max(leaving)
