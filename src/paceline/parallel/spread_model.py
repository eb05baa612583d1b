"""Spreads a model over a mesh: cut into stages, then its layers sharded over tp, then its parameters over fsdp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.dtensor_type import is_dtensor
from paceline.errors import JobError, ModelError
from paceline.parallel.axes import Axes, open_axes
from paceline.parallel.engine import Runner
from paceline.parallel.initial_weights import align, initial_weights
from paceline.parallel.layout import Spread, statistics_dtype
from paceline.parallel.micro_batches import PipelineRunner
from paceline.parallel.model_graph import ModelCall
from paceline.parallel.sharded import recompute, shard
from paceline.parallel.tensor_plan import TensorPlan, apply_tensor_plan, described, tensor_plan_of
from paceline.spec import Job, Plan

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


def spread(
    model: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    world: dist.ProcessGroup,
    example: Any,
    *,
    may_skip: bool,
) -> tuple[Spread, Runner | None]:
    """Spread `model` over the mesh of the plan; a collective of all workers.

    Args:
        example: how the model is called, for a few samples; to cut it into stages.
        may_skip: whether some parameters get no gradient in some steps, on some workers.

    Returns:
        The layout; and what takes shards through the stages of a pipeline, None without one.
    """
    assert plan.mesh is not None
    axes = open_axes(plan.mesh, device, world)
    zero = torch.zeros((), dtype=statistics_dtype(model), device=device)
    weights = initial_weights(model, world)
    pipeline = None if axes.pp is None else _cut(model, job, plan, axes, axes.pp, device, example)
    tensor_plan = tensor_plan_of(model, plan.tensor_plan, axes.mesh.tp) if axes.mesh.tp > 1 else {}
    notes = [] if pipeline is None else list(pipeline.notes)
    notes += [f"tensor plan: {described(tensor_plan)}"] if tensor_plan else []
    for stage in [model] if pipeline is None else pipeline.stages:
        _shard(stage, tensor_plan, axes, plan, device, may_skip=may_skip)
    module = model if pipeline is None else pipeline.module
    weights(module, device)
    layout = Spread(module, device, axes, zero, pipeline, may_skip=may_skip, notes=notes)
    if job.measure_noise and not layout.measures_first_pass:
        notes.append(f"the gradient noise scale is not measured under the strategy {axes.mesh}")
    if job.parity == "bitwise":
        if axes.mesh.fsdp == 1:
            align(module)
        layout.keep_whole_gradients()
    return layout, None if pipeline is None else PipelineRunner(pipeline, layout)


def _cut(
    model: nn.Module, job: Job, plan: Plan, axes: Axes, group: dist.ProcessGroup, device: torch.device, example: Any
) -> Pipeline:
    """Cut the model into the stages of a pipeline."""
    from paceline.parallel.stages import Pipeline  # loads the compiler, for a second

    pipeline = Pipeline(
        model,
        group,
        plan.pipeline,
        None if example is None else ModelCall.of(example),
        device,
        splits_backward=axes.mesh.fsdp == 1 and not plan.recompute,
    )
    for name, stages in pipeline.stages_that_share.items():
        if job.parity == "bitwise":
            raise JobError(
                f"parity = 'bitwise' cannot train this model with {axes.mesh}: '{name}' is used in several stages, "
                "whose gradients would be added in another order than on one worker; use parity = 'numeric', or fsdp."
            )
        # Fully sharded stages take their parameters for themselves, so no two of one worker can have the same.
        if axes.mesh.fsdp > 1 and len({stage % axes.mesh.pp for stage in stages}) < len(stages):
            raise ModelError(
                f"'{name}' is used in stages {', '.join(map(str, stages))}, some of which are on one worker, and with "
                f"{axes.mesh} each of them would train its own copy; use pipeline.stages_per_worker = 1, cut the model "
                "elsewhere (pipeline.cuts), or leave out the axis fsdp."
            )
    return pipeline


def _shard(
    stage: nn.Module, tensor_plan: TensorPlan, axes: Axes, plan: Plan, device: torch.device, *, may_skip: bool
) -> None:
    """Shard a stage's layers over the tp axis, then its parameters over the fsdp axis."""
    mesh = axes.mesh
    if tensor_plan:
        here = dict(stage.named_modules()).keys() & tensor_plan.keys()
        apply_tensor_plan(
            stage, axes.device_mesh["tp"], {name: tensor_plan[name] for name in tensor_plan if name in here}
        )
    if plan.recompute:
        recompute(stage)
    if mesh.fsdp > 1:
        shard(stage, axes.device_mesh["fsdp"], mesh.zero_stage, cpu_offload=plan.cpu_offload, may_skip=may_skip)
    _place(stage, device, plan)


def _place(stage: nn.Module, device: torch.device, plan: Plan) -> None:
    """Move to `device` what has values and was not moved with its shards; with `cpu_offload` these stay."""

    def stays(tensor: Tensor) -> bool:
        is_offloaded = plan.cpu_offload and is_dtensor(tensor)
        return tensor.is_meta or is_offloaded or tensor.device == device

    if not all(stays(tensor) for tensor in (*stage.parameters(), *stage.buffers())):
        stage._apply(lambda tensor: tensor if stays(tensor) else tensor.to(device))
