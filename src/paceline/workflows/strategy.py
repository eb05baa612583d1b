"""The plan of a run: a strategy, and settings such as "plan.recompute=true", placed on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import JobError, did_you_mean
from paceline.plan import place
from paceline.spec import Cluster, Job, Mesh, Plan, parse_mesh
from paceline.spec.codec import from_mapping
from paceline.spec.job import with_settings
from paceline.workflows.arguments import Say, silent
from paceline.workflows.jobs import trace_model

_PREFIX = "plan."
PLAN_KEYS = (
    *("threads_per_worker", "algorithm", "num_servers", "pipeline", "recompute", "tensor_plan", "cpu_offload"),
    *("debug_comm", "timeout_s"),
)
"""The fields of a `Plan` that settings can give; the others follow from the strategy and the devices."""


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the job, and those of the plan, which begin with "plan.". Raises `JobError` for an unknown key."""
    of_plan = [one for one in settings if one.startswith(_PREFIX)]
    keys = [f"{_PREFIX}{one}" for one in PLAN_KEYS]
    for setting in of_plan:
        key = ".".join(setting.partition("=")[0].strip().split(".")[:2])
        if key not in keys:
            hint = did_you_mean(key, keys)
            raise JobError(f"There is no key '{key}' here: {hint}the keys are {', '.join(keys)}.")
    return [one for one in settings if one not in of_plan], of_plan


def place_run(
    job: Job,
    cluster: Cluster,
    num_devices: int,
    strategy: str | None = None,
    settings: Sequence[str] = (),
    given: Plan | None = None,
    say: Say = silent,
) -> Plan:
    """A plan for a job on so many devices.

    Args:
        strategy: how workers divide the model: dp (the default), fsdp, zero1, zero2, hsdp, pp, tp, dp_one_process, a
            mesh such as "dp2 x pp2", or auto: the planner chooses.
        settings: fields of the plan, such as "plan.recompute=true", as `split_settings` returns them.
        given: what `paceline plan` recommended; it counts where no strategy is named.
        say: receives the reason why the planner chose a strategy.

    Raises:
        JobError: a setting without the axis that it speaks of, a job that does not fit, or what `place` refuses.
    """
    settings = [one.removeprefix(_PREFIX) for one in settings]
    chosen = with_settings({}, settings)
    followed = given if strategy is None else None
    asked = from_mapping(Plan, with_settings((followed or Plan()).to_mapping(), settings), "plan")
    mesh = None if followed is None else followed.mesh
    if strategy == "auto":
        from paceline.plan.meshes import choose_mesh

        choice = choose_mesh(job, trace_model(job), cluster, num_devices)
        say(f"strategy {choice.reason}")
        mesh, asked = choice.mesh, replace(asked, recompute=choice.recompute)
    elif strategy not in (None, "dp", "dp_one_process"):
        mesh = parse_mesh(strategy, num_devices, len(cluster.nodes))
    if mesh is not None and mesh.num_workers != num_devices:
        raise JobError(
            f"The plan lays out {mesh.num_workers} workers as {mesh}, not {num_devices}; leave workers out, or name "
            "another strategy."
        )
    _check_needs(asked, job, mesh)
    is_one_process = strategy == "dp_one_process"
    placed = place(
        job,
        cluster,
        1 if is_one_process else num_devices,
        threads_per_worker=asked.threads_per_worker if "threads_per_worker" in chosen else None,
        algorithm=asked.algorithm,
        num_servers=asked.num_servers,
        mesh=mesh,
    )
    return replace(
        placed,
        pipeline=asked.pipeline,
        recompute=asked.recompute,
        tensor_plan=asked.tensor_plan,
        cpu_offload=asked.cpu_offload,
        devices_in_process=num_devices if is_one_process else 1,
        debug_comm=asked.debug_comm,
        timeout_s=asked.timeout_s,
    )


def _check_needs(plan: Plan, job: Job, mesh: Mesh | None) -> None:
    """Raise `JobError` for what has no effect without something that is not there."""
    axes, is_alone = mesh or Mesh(), mesh is not None and mesh.num_workers == 1  # which shares nothing
    is_served = job.aggregation.method == "parameter_server_async" or plan.algorithm.startswith("parameter_server")
    needs = (
        ("plan.pipeline goes with a pipeline, such as strategy = 'pp'", plan.pipeline != Plan.pipeline, axes.pp > 1),
        ("plan.cpu_offload goes with sharded parameters, such as strategy = 'fsdp'", plan.cpu_offload, axes.fsdp > 1),
        ("plan.recompute goes with a mesh, such as strategy = 'fsdp'", plan.recompute, mesh is not None),
        ("plan.num_servers goes with plan.algorithm = 'parameter_server'", plan.num_servers > 1, is_served),
    )
    for what, is_set, is_there in needs:
        if is_set and not is_there and not is_alone:
            raise JobError(f"{what}; name it too, or leave this out.")
