"""`Strategy`: how workers divide a model, and the plan that follows from it."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.plan import place
from paceline.spec import Cluster, Job, Mesh, PipelineSpec, Plan, parse_mesh
from paceline.spec.mesh import ScheduleName
from paceline.workflows.arguments import check_fields
from paceline.workflows.jobs import Say, check_words, silent, trace_model

ONE_PROCESS = "dp_one_process"


@dataclass(frozen=True)
class Strategy:
    """How more than one worker divide the model between them. Example: `Strategy("fsdp", recompute=True)`."""

    strategy: str | None = None
    """How workers divide the model: dp (the default; named, it is checked to fit), fsdp, zero1, zero2, hsdp, pp, tp,
    dp_one_process, a mesh such as 'dp2 x pp2', or auto: the planner chooses."""
    schedule: ScheduleName = "1f1b"
    """The schedule of a pipeline."""
    stages_per_worker: int = 1
    """Stages each worker of a pipeline computes, with the schedule interleaved."""
    cut: Sequence[str] | None = None
    """A module that begins a stage; None: stages of equal time."""
    recompute: bool = False
    """Compute activations again in backward instead of keeping them."""
    cpu_offload: bool = False
    """Keep sharded parameters in CPU memory while they are not used."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_words(cut=self.cut or ())

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
        if self.strategy == ONE_PROCESS:
            return dataclasses.replace(place(job, cluster, 1, **options), devices_in_process=num_devices)
        if self.strategy == "auto":
            return self._chosen(job, cluster, num_devices, say, options)
        if self.strategy is None and planned is not None and planned.mesh is not None:
            if planned.mesh.num_workers != num_devices:
                raise JobError(
                    f"The plan lays out {planned.mesh.num_workers} workers as {planned.mesh}, not {num_devices}; leave "
                    "workers out, or name another strategy."
                )
            plan = place(job, cluster, num_devices, mesh=planned.mesh, **options)
            return dataclasses.replace(
                plan,
                pipeline=planned.pipeline,
                recompute=planned.recompute,
                tensor_plan=planned.tensor_plan,
            )
        mesh = None
        if self.strategy not in (None, "dp"):
            mesh = parse_mesh(self.strategy, num_devices, len(cluster.nodes))
        plan = place(job, cluster, num_devices, mesh=mesh, **options)
        self._check_options(mesh)
        if self.strategy == "dp":  # named by the user: the default skips this check, which needs a trace of the model
            from paceline.plan.mesh_selection import check_fits

            check_fits(job, trace_model(job), num_devices, worker_memory_bytes(cluster, num_devices))
        return dataclasses.replace(
            plan,
            pipeline=PipelineSpec(self.schedule, self.stages_per_worker, tuple(self.cut or ())),
            recompute=self.recompute,
            cpu_offload=self.cpu_offload,
        )

    def _chosen(self, job: Job, cluster: Cluster, num_devices: int, say: Say, options: dict[str, Any]) -> Plan:
        """The best plan according to the planner."""
        from paceline.plan.mesh_selection import choose_mesh

        choice = choose_mesh(
            job, trace_model(job), cluster, num_devices, memory_bytes=worker_memory_bytes(cluster, num_devices)
        )
        say(f"strategy {choice.reason}")
        plan = place(job, cluster, num_devices, mesh=choice.mesh, **options)
        return choice.applied(plan)

    def _check_options(self, mesh: Mesh | None) -> None:
        if mesh is not None and mesh.num_workers == 1:
            return  # one worker shares nothing under any strategy
        axes = mesh or Mesh()
        needs = (
            ("schedule", "a pipeline, such as strategy = 'pp'", self.schedule != "1f1b", axes.pp > 1),
            ("stages_per_worker", "a pipeline, such as strategy = 'pp'", self.stages_per_worker > 1, axes.pp > 1),
            ("cut", "a pipeline, such as strategy = 'pp'", bool(self.cut), axes.pp > 1),
            ("cpu_offload", "sharded parameters, such as strategy = 'fsdp'", self.cpu_offload, axes.fsdp > 1),
            ("recompute", "a mesh, such as strategy = 'fsdp'", self.recompute, mesh is not None),
        )
        for option, what, is_set, is_there in needs:
            if is_set and not is_there:
                raise JobError(f"{option} goes with {what}; name such a strategy or leave it out.")


PLAIN = Strategy()
"""Whole replicas, or what a plan says."""


def worker_memory_bytes(cluster: Cluster, num_workers: int) -> float:
    """The bytes that one worker may use: its share of the hardware, or less where this process is limited."""
    from paceline.plan.memory import worker_memory_bytes as of_hardware
    from paceline.plan.memory import workers_on_fullest_node

    limits = [of_hardware(cluster, workers_on_fullest_node(cluster, num_workers))]
    if cluster.device_kind == "cpu":
        soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        limits += [float(limit) for limit in soft if limit != resource.RLIM_INFINITY]
        cgroup = Path("/sys/fs/cgroup/memory.max")
        text = cgroup.read_text().strip() if cgroup.exists() else "max"
        limits += [int(text) / num_workers] if text.isdigit() else []
    return min(limits)
