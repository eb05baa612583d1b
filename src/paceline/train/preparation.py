"""A script's model and optimizer made ready to train together with their copies on the other workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.comm.buckets import broadcast
from paceline.errors import JobError, ModelError
from paceline.parallel import Buffers, parallelize
from paceline.parallel.layout import is_on_meta
from paceline.parallel.pass_state import accept_single_values
from paceline.spec import Job, Mesh, Plan
from paceline.tensors import to_device
from paceline.train.model_state import ParameterNames, Precision, Trained, rebind
from paceline.train.optim import (
    JointOptimizer,
    LearningRates,
    check_updates_by_element,
    choose_kernels,
    counts_epochs,
    needs_closure,
    parts_of,
)
from paceline.train.process_group import World


def prepare_model(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Any,
    job: Job,
    plan: Plan,
    world: World,
    precision: Precision,
    *,
    find_unused_parameters: bool,
    example: Any,
) -> Trained:
    """Place `model` on this worker's device and tie it to its copies; a collective. The arguments are `Run.prepare`'s.
    Raises `JobError` for a strategy that cannot train this job, `ModelError` for another model's optimizer."""
    optimizer = optimizer if isinstance(optimizer, Optimizer) else JointOptimizer(optimizer)
    schedulers = _checked_schedulers(scheduler, optimizer, job)
    mesh = plan.mesh or Mesh()
    is_compiled = bool(job.compile) or uncompiled(model) is not model
    model = uncompiled(model)
    if is_compiled:
        check_can_be_compiled(job, plan)
    rates = LearningRates(job, optimizer)
    names = ParameterNames.of(optimizer, model)
    if not is_on_meta(model) and mesh.is_plain:
        model.to(world.device)
    if job.precision == "float64":
        model.double()
    if job.channels_last and mesh.is_plain:  # torch shards parameters of the plain format only
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if not model.training:  # as a pretrained one is loaded; else the script has chosen which of its modules are frozen
        model.train()
    accept_single_values(model)
    engine = parallelize(
        model,
        job,
        plan,
        world.device,
        world.group,
        find_unused_parameters=find_unused_parameters,
        example=to_device(example, world.device, torch.float64 if job.precision == "float64" else None),
    )
    if is_compiled:
        engine.passes.seeds.leave_blocks()
        engine.module.compile(options={"fallback_random": True, **_OPTIONS.get(str(job.compile), {})})
    rebind(optimizer, names, engine.module)
    choose_kernels(optimizer, world.device, alike_on_shards=job.parity == "bitwise")
    if job.parity == "bitwise" and not engine.holds_all:
        check_updates_by_element(optimizer, mesh, world.device)
    if job.fuse_shards is not None and not engine.holds_all:
        raise JobError("fuse_shards needs workers that hold the whole model; leave it out, or use the strategy dp.")
    return Trained(optimizer, names, engine, precision, rates, schedulers, needs_closure(optimizer, engine, job))


def freeze(model: nn.Module, job: Job, plan: Plan, world: World) -> Buffers:
    """Make `model` one that is called and not trained: on this worker's device, in evaluation mode, without gradients,
    with rank 0's weights. A collective. Raises `JobError` for a run that cannot have a frozen model beside the one
    that it trains."""
    if plan.devices_in_process > 1 or job.aggregation.method == "parameter_server_async":
        raise JobError(
            "A frozen model cannot be called by several threads at once, as with 'parameter_server_async' or "
            "dp_one_process; choose another strategy."
        )
    if is_on_meta(model):
        raise ModelError("A frozen model must have its weights before run.prepare; load them first.")
    model.to(world.device)
    if job.precision == "float64":
        model.double()
    model.requires_grad_(False).eval()
    broadcast([*model.parameters(), *model.buffers()], world.group)
    return Buffers(model)


def check_several(job: Job, plan: Plan) -> None:
    """Raise `JobError` where workers do not make every step together, or one of them does not hold every model."""
    if plan.devices_in_process > 1 or (plan.mesh or Mesh()).pp > 1 or job.aggregation.method != "every_step":
        raise JobError(
            "This run cannot train several models, which needs the strategy dp, fsdp or tp and aggregation.method = "
            "'every_step'; choose these, or a run for each model."
        )


def _checked_schedulers(scheduler: Any, optimizer: Optimizer, job: Job) -> tuple[Any, ...]:
    """The schedulers given to `Run.prepare`."""
    given = () if scheduler is None else tuple(scheduler) if isinstance(scheduler, list | tuple) else (scheduler,)
    for one in given:
        name = type(one).__name__
        if isinstance(one, ReduceLROnPlateau):
            raise JobError(f"{name} needs a metric: give it to run.keep, and call its step after run.evaluate.")
        if not any(getattr(one, "optimizer", None) is other for other in parts_of(optimizer)):
            raise JobError(f"The {name} given to run.prepare belongs to another optimizer; build it from this one.")
        if counts_epochs(job):
            raise JobError(
                f"The job's optim.schedule or warmup_epochs sets the learning rate in every step, and so does {name}; "
                "choose one of them."
            )
    return given


# --- torch.compile: the model itself is trained, compiled once its layers are what a strategy made of them ---

_OPTIONS: dict[str, dict[str, bool]] = {
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True, "coordinate_descent_tuning": True},
}
"""torch.compile's modes as its options, which cannot be given beside a mode.

Beside them compiled kernels draw the random numbers of eager ones: a worker that meets too many shapes computes without
kernels of its own, at a moment that depends on the number of workers, and dropout masks must not change with it."""


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile(model)` wraps, or the model itself: strategies find its layers, and its weights
    have their own names."""
    return dict(model.named_children()).get("_orig_mod", model)


def check_can_be_compiled(job: Job, plan: Plan) -> None:
    """Raises `JobError` where a compiled model would not be used, as torch.compile sees no copies and stages of it, or
    would train otherwise, as compiled kernels may differ between shapes."""
    if job.parity == "bitwise" or (plan.mesh or Mesh()).pp > 1 or plan.devices_in_process > 1:
        raise JobError(
            "A model from torch.compile needs parity = 'numeric' and the strategy dp, fsdp or tp; choose these, or "
            "leave compile out."
        )
