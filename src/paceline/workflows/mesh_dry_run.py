"""`paceline.dry_run_mesh`: tries a mesh without its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError
from paceline.spec import Job, Mesh, parse_mesh
from paceline.spec.mesh import AXES, AxisName
from paceline.spec.mesh_name import num_named
from paceline.words import size
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import resolve_job
from paceline.workflows.traced_model import model_on_paper

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.parallel.dry_run.dry_run import DryRun


@dataclass(frozen=True)
class MeshDryRun:
    """What each worker of a mesh would hold and send."""

    mesh: Mesh
    virtual_shard_size: int
    """Samples of one micro-batch."""
    found: DryRun

    @property
    def sent_bytes(self) -> dict[AxisName, int]:
        """The bytes that the busiest worker sends in a step, along each axis."""
        return {axis: round(self.found.sent_bytes(axis)) for axis in AXES if self.mesh.degree(axis) > 1}

    def table(self) -> RenderableType:
        """A table of the stages, and the lines around it."""
        from rich.console import Group

        from paceline.report.tables import table

        stages = table("stage", "layers", "parameters", "activations", "memory", left=["layers"])
        for number, (stage, memory) in enumerate(zip(self.found.stages, self.found.memory, strict=True)):
            held = (stage.parameter_bytes, stage.activation_bytes, memory.total_bytes)
            stages.add_row(str(number), " … ".join(stage.layers), *map(size, held))
        count = self.found.num_micro_batches
        return Group(
            f"{self.mesh}: {self.mesh.num_workers} workers, {count} micro-batch{'es' * (count > 1)} of "
            f"{self.virtual_shard_size} a share and step",
            stages,
            *([f"--cut {' --cut '.join(self.found.cuts)}"] if self.found.cuts else []),
            *([f"tensor plan:\n{self.found.tensor_plan}"] if self.mesh.tp > 1 else []),
            *(f"{axis}: a worker sends {size(num_bytes)} a step" for axis, num_bytes in self.sent_bytes.items()),
            f"pipeline bubble: {self.found.bubble:.0%}",
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

    Example: `paceline.dry_run_mesh("digits-lenet", "dp4 x pp2").found.bubble`.

    Args:
        job: a job, a job file (TOML) or the name of a recipe.
        mesh: such as "dp128 x tp8".
        model, data, settings: as for `train`.

    Raises:
        JobError: not a mesh, or one that divides the batch into more than the job's virtual shards.
    """
    degrees = parse_mesh(mesh, num_named(mesh))
    resolved = resolve_job(job, settings, data, model)
    if degrees.num_assignments > resolved.virtual_shards:
        raise JobError(
            f"{degrees} divides the batch {degrees.num_assignments} ways, and the job has virtual_shards = "
            f"{resolved.virtual_shards}; "
            f"use virtual_shards = {degrees.num_assignments} or more, or fewer replicas."
        )
    from paceline.parallel.dry_run.dry_run import dry_run

    module, arguments = model_on_paper(resolved, resolved.shard_size)
    found = dry_run(
        module,
        arguments,
        degrees,
        num_micro_batches=-(-resolved.virtual_shards // degrees.num_assignments),
        optimizer_copies=resolved.optim.state_copies,
        is_bitwise=resolved.parity == "bitwise",
    )
    return MeshDryRun(degrees, resolved.shard_size, found)
