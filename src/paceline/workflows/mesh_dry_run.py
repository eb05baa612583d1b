"""`paceline.dry_run_mesh`: tries a mesh without its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, ModelError
from paceline.plan.memory import DeviceMemory, job_memory
from paceline.plan.meshes import num_gathers_and_scatters
from paceline.spec import Job, Mesh, parse_mesh
from paceline.spec.codec import JsonValue
from paceline.spec.model_cost import Layers
from paceline.spec.plan import AxisName
from paceline.words import number_of, size
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import resolve_job, trace_model

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class MeshDryRun(JsonValue):
    """What each worker of a mesh would hold and send."""

    mesh: Mesh
    memory: DeviceMemory
    """Of the fullest worker."""
    sent_bytes: dict[AxisName, int]
    """What the busiest worker sends in a step, along each axis, but for the loss, and gradients of parameters that
    stages share."""
    cuts: tuple[str, ...]
    """The modules that begin a stage, without the first stage's, as in `PipelineSpec`."""

    def table(self) -> RenderableType:
        """What the fullest worker holds, and what the busiest one sends."""
        from rich.console import Group

        from paceline.report.tables import table

        memory = self.memory
        title = f"{self.mesh}, {number_of(self.mesh.num_workers, 'worker')}"
        held = table(title, "one holds", "and sends a step", left=[title])
        parts = {
            "parameters": memory.parameter_bytes,
            "gradients": memory.gradient_bytes,
            "optimizer state": memory.optimizer_bytes,
            "activations": memory.activation_bytes,
            "in messages and sums": memory.moving_bytes,
            "in all": memory.total_bytes,
        }
        for name, num_bytes in parts.items():
            held.add_row(name, size(num_bytes), "")
        for axis, num_bytes in self.sent_bytes.items():
            held.add_row(f"along {axis}", "", size(num_bytes))
        return Group(held, *([f"--set 'plan.pipeline.cuts={json.dumps(self.cuts)}'"] if self.cuts else []))

    def _repr_html_(self) -> str:
        from paceline.report.tables import html_of

        return html_of(self.table())


@checked
def dry_run_mesh(
    job: Job | str | Path,
    mesh: str,
    *,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
) -> MeshDryRun:
    """Try a mesh without its devices, with as many workers as its degrees make.

    Example: `paceline.dry_run_mesh("digits-lenet", "dp4 x pp2").sent_bytes`.

    Args:
        job: a job, a job file (TOML) or the name of a recipe.
        mesh: such as "dp128 x tp8".
        model, data, settings: as for `train`.

    Raises:
        JobError: not a mesh, or one that divides the batch into more than the job's virtual shards.
        ModelError: the model cannot be cut into these stages, or its layers not be divided so.
    """
    degrees = parse_mesh(mesh)
    resolved = resolve_job(job, settings, data, model)
    if degrees.num_assignments > resolved.virtual_shards:
        raise JobError(
            f"{degrees} divides the batch {degrees.num_assignments} ways, and the job has virtual_shards = "
            f"{resolved.virtual_shards}; use more of them, or fewer replicas."
        )
    cost, num_micro_batches = trace_model(resolved), -(-resolved.virtual_shards // degrees.num_assignments)
    if degrees.tp > 1 and not any(layer.is_sharded_by(degrees.tp) for layer in cost.layers):
        raise ModelError(
            f"The model has no tensor plan by which {degrees.tp} workers could divide a layer; leave tp out."
        )
    memory = job_memory(resolved, cost, degrees)
    sent = _sent_bytes(degrees, memory.stages, num_micro_batches, resolved.shard_size * num_micro_batches)
    cuts = tuple(stage[0].name for stage in memory.stages[1:])
    return MeshDryRun(degrees, replace(memory, stages=()), sent, cuts)


def _sent_bytes(mesh: Mesh, stages: Sequence[Layers], num_micro_batches: int, num_samples: int) -> dict[AxisName, int]:
    """In an all-reduce of S bytes each of n workers sends 2 (n - 1)/n S, in an all-gather or reduce-scatter half."""
    found: dict[AxisName, float] = {}
    num_exchanges, arriving = sum(num_gathers_and_scatters(mesh.zero_stage, num_micro_batches)), 0.0
    for stage in stages:
        own = sum(layer.parameter_bytes / layer.tensor_shards(mesh.tp) for layer in stage)
        summed = sum(layer.num_all_reduces * layer.all_reduce_bytes for layer in stage if layer.is_sharded_by(mesh.tp))
        leaving = stage[-1].output_bytes if stage is not stages[-1] else 0.0
        sent: dict[AxisName, float] = {
            "pp": num_samples * (leaving + arriving),
            "dp": 2 * (mesh.dp - 1) / mesh.dp * own / mesh.fsdp,
            "fsdp": num_exchanges * (mesh.fsdp - 1) / mesh.fsdp * own,
            "tp": 2 * (mesh.tp - 1) / mesh.tp * num_samples * summed,
        }
        found = {axis: max(found.get(axis, 0.0), num_bytes) for axis, num_bytes in sent.items()}
        arriving = leaving
    return {axis: round(num_bytes) for axis, num_bytes in found.items() if mesh.degree(axis) > 1}
