"""How a command line says by which strategy workers share out a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paceline.errors import JobError
from paceline.plan import place
from paceline.spec import Cluster, Job, Mesh, PipelineSpec, Plan, parse_mesh
from paceline.spec.mesh import ScheduleName

ONE_PROCESS = "dp_one_process"


@dataclass(frozen=True)
class Strategy:
    """Every field is an option of the commands that train."""

    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME|MESH", help="auto, dp, fsdp, zero1, zero2, hsdp, pp, tp, dp_one_process, or 'dp2 x pp2'."
        ),
    ] = "auto"
    schedule: Annotated[ScheduleName, typer.Option(help="In which order a pipeline's stages take turns.")] = "1f1b"
    stages_per_worker: Annotated[
        int, typer.Option(min=1, help="Stages each worker of a pipeline computes, with the schedule interleaved.")
    ] = 1
    cut: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="A module that begins a stage; none: stages of equal time. Repeatable."),
    ] = None
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute activations again in backward instead of keeping them.")
    ] = False
    cpu_offload: Annotated[
        bool, typer.Option("--cpu-offload", help="Keep sharded parameters in host memory while they are not used.")
    ] = False

    def mesh(self, num_workers: int, num_nodes: int = 1) -> Mesh | None:
        """The axes it names; None: it names none, or one process with all devices."""
        if self.strategy in ("auto", "dp", ONE_PROCESS):
            return None
        return parse_mesh(self.strategy, num_workers, num_nodes)

    def placed(self, job: Job, cluster: Cluster, num_devices: int, **wishes: Any) -> Plan:
        """A plan for a job on so many devices; `wishes` and what it raises are as for `place`.

        Raises:
            JobError: an option without the axis that it speaks of.
        """
        if self.strategy == ONE_PROCESS:
            return dataclasses.replace(place(job, cluster, 1, **wishes), devices_in_process=num_devices)
        mesh = self.mesh(num_devices, len(cluster.nodes))
        plan = place(job, cluster, num_devices, mesh=mesh, **wishes)
        needs = (
            ("--schedule", "a pipeline, such as --strategy pp", self.schedule != "1f1b", mesh is None or mesh.pp == 1),
            ("--stages-per-worker", "a pipeline", self.stages_per_worker > 1, mesh is None or mesh.pp == 1),
            ("--cut", "a pipeline, such as --strategy pp", bool(self.cut), mesh is None or mesh.pp == 1),
            ("--cpu-offload", "sharding: --strategy fsdp", self.cpu_offload, mesh is None or mesh.fsdp == 1),
            ("--recompute", "a mesh, such as --strategy fsdp", self.recompute, mesh is None or mesh.is_plain),
        )
        for option, what, is_set, is_missing in needs:
            if is_set and is_missing and plan.world_size > 1:
                raise JobError(f"{option} goes with {what}; leave it out or name the strategy.")
        return dataclasses.replace(
            plan,
            pipeline=PipelineSpec(self.schedule, self.stages_per_worker, tuple(self.cut or ())),
            recompute=self.recompute,
            cpu_offload=self.cpu_offload,
        )


AUTO = Strategy()
"""A command line that says nothing of it."""
