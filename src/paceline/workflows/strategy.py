"""`Strategy`: how workers divide a model, and the plan that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import JobError
from paceline.plan import place
from paceline.spec import Cluster, Job, Mesh, PipelineSpec, Plan, parse_mesh
from paceline.spec.codec import PositiveInt, check_values
from paceline.spec.mesh import ScheduleName
from paceline.workflows.arguments import Say, silent
from paceline.workflows.jobs import trace_model


@dataclass(frozen=True)
class Strategy:
    """How more than one worker divide the model between them. Example: `Strategy("fsdp", recompute=True)`."""

    strategy: str | None = None
    """How workers divide the model: dp (the default), fsdp, zero1, zero2, hsdp, pp, tp, dp_one_process, a mesh such as
    'dp2 x pp2', or auto: the planner chooses."""
    schedule: ScheduleName = "1f1b"
    """The schedule of a pipeline."""
    stages_per_worker: PositiveInt = 1
    """Stages each worker of a pipeline computes, with the schedule interleaved."""
    cut: tuple[str, ...] = ()
    """A module that begins a stage; by default stages take equal time."""
    recompute: bool = False
    """Compute activations again in backward instead of keeping them."""
    cpu_offload: bool = False
    """Keep sharded parameters in CPU memory while they are not used."""

    def __post_init__(self) -> None:
        check_values(self)

    def placed(
        self,
        job: Job,
        cluster: Cluster,
        num_devices: int,
        planned: Plan | None = None,
        say: Say = silent,
        **options: Any,
    ) -> Plan:
        """A plan for a job on so many devices.

        Args:
            planned: what `paceline plan` recommended; its mesh counts where no strategy is named.
            say: receives the reason why the planner chose a strategy.
            options: as for `plan.place`.

        Raises:
            JobError: an option without the axis that it speaks of, a job that does not fit, or what `place` refuses.
        """
        if self.strategy == "dp_one_process":
            return replace(place(job, cluster, 1, **options), devices_in_process=num_devices)
        if self.strategy == "auto":
            from paceline.plan.meshes import choose_mesh

            choice = choose_mesh(job, trace_model(job), cluster, num_devices)
            say(f"strategy {choice.reason}")
            plan = place(job, cluster, num_devices, mesh=choice.mesh, **options)
            return replace(plan, recompute=choice.recompute)
        if self.strategy is None and planned is not None and planned.mesh is not None:
            if planned.mesh.num_workers != num_devices:
                raise JobError(
                    f"The plan lays out {planned.mesh.num_workers} workers as {planned.mesh}, not {num_devices}; leave "
                    "workers out, or name another strategy."
                )
            plan = place(job, cluster, num_devices, mesh=planned.mesh, **options)
            return replace(
                plan, pipeline=planned.pipeline, recompute=planned.recompute, tensor_plan=planned.tensor_plan
            )
        mesh = None
        if self.strategy not in (None, "dp"):
            mesh = parse_mesh(self.strategy, num_devices, len(cluster.nodes))
        plan = place(job, cluster, num_devices, mesh=mesh, **options)
        self._check_options(mesh)
        pipeline = PipelineSpec(self.schedule, self.stages_per_worker, tuple(self.cut))
        return replace(plan, pipeline=pipeline, recompute=self.recompute, cpu_offload=self.cpu_offload)

    def _check_options(self, mesh: Mesh | None) -> None:
        if mesh is not None and mesh.num_workers == 1:
            return  # one worker shares nothing under any strategy
        axes = mesh or Mesh()
        of_pipeline = self.schedule != "1f1b" or self.stages_per_worker > 1 or bool(self.cut)
        needs = (
            ("schedule, stages_per_worker and cut go with a pipeline, such as 'pp'", of_pipeline, axes.pp > 1),
            ("cpu_offload goes with sharded parameters, such as 'fsdp'", self.cpu_offload, axes.fsdp > 1),
            ("recompute goes with a mesh, such as 'fsdp'", self.recompute, mesh is not None),
        )
        for what, is_set, is_there in needs:
            if is_set and not is_there:
                raise JobError(f"{what}; name such a strategy or leave it out.")


PLAIN = Strategy()
"""Whole replicas, or what a plan says."""
