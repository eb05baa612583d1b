"""`paceline.dry_run_mesh`: tries a mesh without its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError
from paceline.plan.memory import device_memory, parts_in_words, state_bytes
from paceline.plan.search import num_gathers_and_scatters
from paceline.spec import Job, Mesh, parse_mesh
from paceline.spec.mesh import AxisName
from paceline.spec.mesh_name import num_named
from paceline.spec.model_cost import DeviceMemory, Layers
from paceline.words import size
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import model_on_paper, resolve_job, trace_model

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class MeshDryRun:
    """What each worker of a mesh would hold and send."""

    mesh: Mesh
    virtual_shard_size: int
    """Samples of one micro-batch."""
    num_micro_batches: int
    stages: tuple[Layers, ...]
    """The layers of each stage of the pipeline."""
    memory: DeviceMemory
    """Of the fullest worker."""
    tensor_plan: Mapping[str, str]
    """How the layers are divided along tp."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """The modules that begin a stage, without the first stage's, as in `PipelineSpec`."""
        return tuple(stage[0].name for stage in self.stages[1:])

    @property
    def bubble(self) -> float:
        """The fraction of time in which workers of a pipeline wait: 1 - m t / ((m + p - 1) t_max), where t is the mean
        stage time (Huang et al. 2019, "GPipe", section 2.3, for stages that differ)."""
        times = [sum(layer.time_s for layer in stage) for stage in self.stages]
        num_turns = self.num_micro_batches + len(times) - 1
        mean = sum(times) / len(times)
        return 1 - self.num_micro_batches * mean / (num_turns * max(times)) if max(times) else 0.0

    def parameter_bytes(self, stage: Layers) -> float:
        """Bytes of a stage's parameters on one worker, gathered along fsdp."""
        return sum(layer.parameter_bytes / layer.tensor_shards(self.mesh.tp) for layer in stage)

    def activation_bytes(self, stage: Layers) -> float:
        """Bytes that one micro-batch keeps on a worker of a stage for backward."""
        tp = self.mesh.tp
        return self.virtual_shard_size * sum(
            layer.activation_bytes
            * (layer.replicated_fraction + (1 - layer.replicated_fraction) / layer.tensor_shards(tp))
            for layer in stage
        )

    @property
    def sent_bytes(self) -> dict[AxisName, int]:
        """The bytes that the busiest worker sends in a step, along each axis.

        In an all-reduce of S bytes each of n workers sends 2 (n - 1)/n S, in an all-gather or reduce-scatter half. The
        loss, and gradients of parameters that stages share, are not counted.
        """
        mesh = self.mesh
        found: dict[AxisName, float] = {"pp": 0.0, "dp": 0.0, "fsdp": 0.0, "tp": 0.0}
        num_exchanges = sum(num_gathers_and_scatters(mesh.zero_stage, self.num_micro_batches))
        samples = self.virtual_shard_size * self.num_micro_batches
        arriving = 0.0
        for stage in self.stages:
            own = self.parameter_bytes(stage)
            leaving = stage[-1].output_bytes if stage is not self.stages[-1] else 0.0
            summed = sum(
                layer.num_all_reduces * layer.all_reduce_bytes for layer in stage if layer.is_sharded_by(mesh.tp)
            )
            sent: dict[AxisName, float] = {
                "pp": samples * (leaving + arriving),
                "dp": 2 * (mesh.dp - 1) / mesh.dp * own / mesh.fsdp,
                "fsdp": num_exchanges * (mesh.fsdp - 1) / mesh.fsdp * own,
                "tp": 2 * (mesh.tp - 1) / mesh.tp * samples * summed,
            }
            found = {axis: max(found[axis], num_bytes) for axis, num_bytes in sent.items()}
            arriving = leaving
        return {axis: round(num_bytes) for axis, num_bytes in found.items() if mesh.degree(axis) > 1}

    def table(self) -> RenderableType:
        """A table of the stages, and the lines around it."""
        from rich.console import Group

        from paceline.report.tables import table

        plan_lines = []
        if self.tensor_plan:
            from paceline.parallel.tensor_plan import described

            plan_lines.append(f"tensor plan: {described(self.tensor_plan)}")
        stages = table("stage", "layers", "parameters", "activations", left=["layers"])
        for number, stage in enumerate(self.stages):
            held = (self.parameter_bytes(stage), self.activation_bytes(stage))
            stages.add_row(str(number), f"{stage[0].name} … {stage[-1].name}", *map(size, held))
        count = self.num_micro_batches
        return Group(
            f"{self.mesh}: {self.mesh.num_workers} workers, {count} micro-batch{'es' * (count > 1)} of "
            f"{self.virtual_shard_size} a share and step",
            stages,
            f"the fullest worker holds {size(self.memory.total_bytes)}: {parts_in_words(self.memory)}",
            *([f"--set 'plan.cut={json.dumps(self.cuts)}'"] if self.cuts else []),
            *plan_lines,
            *(f"{axis}: a worker sends {size(num_bytes)} a step" for axis, num_bytes in self.sent_bytes.items()),
            f"pipeline bubble: {self.bubble:.0%}",
        )

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

    Example: `paceline.dry_run_mesh("digits-lenet", "dp4 x pp2").bubble`.

    Args:
        job: a job, a job file (TOML) or the name of a recipe.
        mesh: such as "dp128 x tp8".
        model, data, settings: as for `train`.

    Raises:
        JobError: not a mesh, or one that divides the batch into more than the job's virtual shards.
        ModelError: the model cannot be cut into these stages, or its layers not be divided so.
    """
    degrees = parse_mesh(mesh, num_named(mesh))
    resolved = resolve_job(job, settings, data, model)
    if degrees.num_assignments > resolved.virtual_shards:
        raise JobError(
            f"{degrees} divides the batch {degrees.num_assignments} ways, and the job has virtual_shards = "
            f"{resolved.virtual_shards}; "
            f"use virtual_shards = {degrees.num_assignments} or more, or fewer replicas."
        )
    tensor_plan: Mapping[str, str] = {}
    if degrees.tp > 1:
        from paceline.parallel.tensor_plan import tensor_plan_of

        tensor_plan = tensor_plan_of(model_on_paper(resolved, 1)[0], None, degrees.tp)
    cost = trace_model(resolved)
    num_micro_batches = -(-resolved.virtual_shards // degrees.num_assignments)
    memory = device_memory(
        cost.num_parameters,
        state_bytes(resolved),
        degrees,
        cost.activations,
        resolved.shard_size,
        num_micro_batches=num_micro_batches,
        layers=cost.layers,
    )
    return MeshDryRun(degrees, resolved.shard_size, num_micro_batches, memory.stages, memory, tensor_plan)
