"""Builds the engine that trains a model on all workers from a job and a plan: a strategy is a choice of its parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.comm import ALGORITHMS, WIRE_DTYPES, Aggregator, open_links
from paceline.comm.buckets import broadcast
from paceline.errors import JobError, ModelError
from paceline.parallel.copies import Copies
from paceline.parallel.engine import Engine, Runner
from paceline.parallel.fixed_order_sum import FixedOrderSum
from paceline.parallel.initial_weights import align, draw
from paceline.parallel.layout import Layout, is_on_meta
from paceline.parallel.outer_steps import OuterSteps
from paceline.parallel.running_sum import RunningSum
from paceline.spec import Job, Plan
from paceline.spec.algorithm import AlgorithmName, automatic_algorithm


def parallelize(
    model: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    find_unused_parameters: bool = False,
    example: Any = None,
) -> Engine:
    """Make `model` train together with its copies on the other workers; a collective of `group`.

    Args:
        find_unused_parameters: whether some parameters get no gradient in some steps, on some workers.
        example: what the model is called with, for a few samples, as `Run.prepare` takes it; a pipeline is cut by it.

    Raises:
        JobError: a strategy that this job cannot be trained with.
        ModelError: a layer whose result depends on the number of workers.
    """
    _check_layers(model)
    if plan.mesh is not None and not plan.mesh.is_plain and group is not None:
        # Torch's parts for it take long to load, and most runs need none of them.
        from paceline.parallel.spread_model import spread

        return _every_step(
            *spread(model, job, plan, device, group, example, may_skip=find_unused_parameters), job, plan
        )
    if is_on_meta(model):
        draw(copy.deepcopy(model), model, device)
    else:
        broadcast([*model.parameters(), *model.buffers()], group)
    if job.parity == "bitwise":
        align(model)
    if plan.devices_in_process > 1:
        if job.parity == "bitwise":
            raise JobError(
                "parity = 'bitwise' needs the strategy dp: dp_one_process is equal up to rounding only; use "
                "parity = 'numeric'."
            )
        layout = Layout(model, device, None)
        copies = Copies(model, plan, device)
        return Engine(layout, RunningSum(layout, None), copies, [copies.note])
    if job.aggregation.is_infrequent:  # each worker trains alone, and weights are averaged every few steps
        aggregator, algorithm, notes = set_up_aggregation(job, plan, group, device)
        return OuterSteps(Layout(model, device, None), job.aggregation, group, aggregator, notes, algorithm)
    # One worker alone is its own server: there is nothing asynchronous about it.
    if job.aggregation.method == "parameter_server_async" and group is not None:
        from paceline.parallel.async_servers import AsyncServers

        return AsyncServers(model, job, plan, device, group)
    return _every_step(Layout(model, device, group), None, job, plan)


def _every_step(layout: Layout, runner: Runner | None, job: Job, plan: Plan) -> Engine:
    """The engine of workers that meet in every step."""
    if job.parity == "bitwise":
        return Engine(layout, FixedOrderSum(layout), runner)
    aggregator, algorithm, notes = set_up_aggregation(job, plan, layout.replicas, layout.device)
    return Engine(layout, RunningSum(layout, aggregator), runner, notes, algorithm)


def set_up_aggregation(
    job: Job, plan: Plan, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Aggregator | None, AlgorithmName | None, Sequence[str]]:
    """How the workers of a group sum gradients: by which algorithm (the plan's, or what "auto" is here), and notes."""
    if group is None:
        return None, None, ()
    links = open_links(group, device, plan.timeout_s)
    wire = job.aggregation.wire
    if wire == "auto-lossy":
        # A smaller message pays between nodes; inside of one it costs more to write than to send.
        wire = "bfloat16" if len(links.nodes) > 1 else "float32"
    algorithm = plan.algorithm
    if algorithm == "auto":
        sizes = [len(node) for node in links.nodes]
        algorithm = automatic_algorithm(sizes, is_gloo=links.device.type == "cpu", wire=wire)
    notes: tuple[str, ...] = ()
    if WIRE_DTYPES[wire] is not None:
        notes = (f"gradients are sent rounded to {wire}, so the result may depend on the number of workers",)
    links = replace(links, wire=WIRE_DTYPES[wire], num_servers=min(plan.num_servers, links.world_size))
    aggregator = Aggregator(ALGORITHMS[algorithm], links, check_always=plan.debug_comm)
    return aggregator, algorithm, notes


def _check_layers(model: nn.Module) -> None:
    """Raises `ModelError` for what would train otherwise on another number of workers."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm is not None or layer.sparse):
            raise ModelError(
                f"The embedding '{name}' has max_norm, which shortens the rows that a worker looks up on this worker "
                "only, or sparse gradients, which workers cannot add up; build it without, and shorten rows after "
                "run.step (weight.renorm_(2, 0, max_norm))."
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"The parameter '{name}' of a lazy layer has no shape yet; call the model with an example before the "
                "optimizer is made and run.prepare is called."
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise ModelError(
                f"The parameter '{name}' has complex numbers, which workers cannot add up; hold its real and imaginary "
                "parts in a parameter and compute with torch.view_as_complex(parameter)."
            )
