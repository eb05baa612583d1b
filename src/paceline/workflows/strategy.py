"""How a command line says by which strategy workers share out a model."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import JobError
from paceline.plan import place
from paceline.spec import Cluster, Job, Mesh, PipelineSpec, Plan, parse_mesh
from paceline.spec.mesh import ScheduleName

if TYPE_CHECKING:
    from paceline.spec.model_cost import ModelCost

ONE_PROCESS = "dp_one_process"


@dataclass(frozen=True)
class Strategy:
    """Every field is an option of the commands that train."""

    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MESH",
            help="How workers share the model: dp (the default; named, it is checked to fit), fsdp, zero1, zero2, "
            "hsdp, pp, tp, dp_one_process, a mesh such as 'dp2 x pp2', or auto: the planner chooses.",
        ),
    ] = None
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
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel", help="Between layers shared by tp, keep a part of the positions on each worker."
        ),
    ] = False
    cpu_offload: Annotated[
        bool, typer.Option("--cpu-offload", help="Keep sharded parameters in host memory while they are not used.")
    ] = False

    def placed(self, job: Job, cluster: Cluster, num_devices: int, planned: Plan | None = None, **wishes: Any) -> Plan:
        """A plan for a job on so many devices.

        Args:
            planned: what `paceline plan` recommended; its mesh counts where no strategy is named.
            wishes: as for `place`.

        Raises:
            JobError: an option without the axis that it speaks of, a job that does not fit, or what `place` refuses.
        """
        if self.strategy == ONE_PROCESS:
            return dataclasses.replace(place(job, cluster, 1, **wishes), devices_in_process=num_devices)
        if self.strategy == "auto":
            chosen = self._chosen(job, cluster, num_devices, wishes)
            return dataclasses.replace(chosen, sequence_parallel=self.sequence_parallel)
        if self.strategy is None and planned is not None and planned.mesh is not None:
            if planned.mesh.num_workers != num_devices:
                raise JobError(
                    f"The plan lays out {planned.mesh.num_workers} workers as {planned.mesh}, not {num_devices}; leave "
                    "--workers out, or name another --strategy."
                )
            plan = place(job, cluster, num_devices, mesh=planned.mesh, **wishes)
            return dataclasses.replace(
                plan,
                pipeline=planned.pipeline,
                recompute=planned.recompute,
                sequence_parallel=self.sequence_parallel or planned.sequence_parallel,
            )
        mesh = None
        if self.strategy not in (None, "dp"):
            mesh = parse_mesh(self.strategy, num_devices, len(cluster.nodes))
        plan = place(job, cluster, num_devices, mesh=mesh, **wishes)
        self._check_options(mesh)
        if self.strategy == "dp":  # who says nothing gets it unasked, at once
            self._check_replicas_fit(job, cluster, num_devices)
        return dataclasses.replace(
            plan,
            pipeline=PipelineSpec(self.schedule, self.stages_per_worker, tuple(self.cut or ())),
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
            cpu_offload=self.cpu_offload,
        )

    def _chosen(self, job: Job, cluster: Cluster, num_devices: int, wishes: dict[str, Any]) -> Plan:
        """What the planner takes for the best."""
        from paceline.plan.mesh_selection import choose_mesh

        choice = choose_mesh(
            job, facts_of(job), cluster, num_devices, memory_bytes=worker_memory_bytes(cluster, num_devices)
        )
        print(f"strategy {choice.reason}", file=sys.stderr)
        plan = place(job, cluster, num_devices, mesh=choice.mesh, **wishes)
        micro_batch_size = plan.micro_batch_size
        chosen = choice.applied(plan)
        return chosen if micro_batch_size is None else dataclasses.replace(chosen, micro_batch_size=micro_batch_size)

    @staticmethod
    def _check_replicas_fit(job: Job, cluster: Cluster, num_devices: int) -> None:
        from paceline.plan.mesh_selection import check_fits

        check_fits(job, facts_of(job), Mesh(dp=num_devices), worker_memory_bytes(cluster, num_devices))

    def _check_options(self, mesh: Mesh | None) -> None:
        if mesh is None or mesh.num_workers > 1:  # one worker shares nothing, whatever is said of it
            has_pp, has_fsdp = mesh is not None and mesh.pp > 1, mesh is not None and mesh.fsdp > 1
            has_tp = mesh is not None and mesh.tp > 1
            needs = (
                ("--schedule", "a pipeline, such as --strategy pp", self.schedule != "1f1b", has_pp),
                ("--stages-per-worker", "a pipeline, such as --strategy pp", self.stages_per_worker > 1, has_pp),
                ("--cut", "a pipeline, such as --strategy pp", bool(self.cut), has_pp),
                ("--cpu-offload", "sharded parameters, such as --strategy fsdp", self.cpu_offload, has_fsdp),
                ("--sequence-parallel", "shared layers, such as --strategy tp", self.sequence_parallel, has_tp),
                ("--recompute", "a mesh, such as --strategy fsdp", self.recompute, mesh is not None),
            )
            for option, what, is_set, is_there in needs:
                if is_set and not is_there:
                    raise JobError(f"{option} goes with {what}; name such a strategy or leave it out.")


def largest_that_fits(plan_for: Callable[[Cluster, int], Plan], least: int) -> Callable[[Cluster, int], Plan]:
    """`plan_for`, but for fewer workers, at least so many, where it has no plan for as many as there are."""

    def plan_within(cluster: Cluster, most: int) -> Plan:
        try:
            return plan_for(cluster, most)
        except JobError:
            if most <= least:
                raise
            return plan_within(cluster, most - 1)

    return plan_within


def check_may_shrink(plan_within: Callable[[Cluster, int], Plan], cluster: Cluster, least: int, most: int) -> None:
    """Raises `JobError` where a run of `most` workers could never go on with fewer, though that is what is wanted."""
    if least == most:
        return
    try:
        plan_within(cluster, most - 1)
    except JobError as problem:
        raise JobError(
            f"With --min-workers {least} the run is to go on with fewer than {most} workers, which it never could: "
            f"{problem} Leave the degree of one axis out, such as 'dp x pp2', or lower --min-workers."
        ) from None


PLAIN = Strategy()
"""A command line that says nothing of it."""


def facts_of(job: Job) -> ModelCost:
    """What the job's model tells on paper. Loads torch."""
    from paceline.workflows.traced_model import trace_model

    return trace_model(job)


def worker_memory_bytes(cluster: Cluster, num_workers: int) -> float:
    """What one worker may use: its part of the hardware, or less where this process is limited."""
    from paceline.plan.mesh_selection import worker_memory_bytes as of_hardware

    limits = [of_hardware(cluster, num_workers)]
    if cluster.device_kind == "cpu":
        soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        limits += [float(limit) for limit in soft if limit != resource.RLIM_INFINITY]
        cgroup = Path("/sys/fs/cgroup/memory.max")
        text = cgroup.read_text().strip() if cgroup.exists() else "max"
        limits += [int(text) / num_workers] if text.isdigit() else []
    return min(limits)
