"""Builds the engine that trains a model on all workers from a job and a plan: a strategy is a choice of its parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm import open_links
from paceline.errors import JobError
from paceline.parallel.aggregation import Aggregation, set_up_aggregation
from paceline.parallel.async_servers import AsyncServers
from paceline.parallel.copies import Copies, devices_of_process
from paceline.parallel.engine import Engine, Runner
from paceline.parallel.fixed_order_sum import FixedOrderSum
from paceline.parallel.initial_weights import align, initial_weights
from paceline.parallel.layout import Whole
from paceline.parallel.outer_steps import OuterSteps
from paceline.parallel.running_sum import RunningSum
from paceline.parallel.unsuitable_layers import check_complex, check_layers
from paceline.spec import Job, Plan, check_mesh


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
    check_layers(model, job, is_alone=group is None and plan.devices_in_process == 1)
    check_complex(model, job, plan)
    if plan.mesh is not None and not plan.mesh.is_plain and group is not None:
        # Torch's parts for it take long to load, and most runs need none of them.
        from paceline.parallel.spread_model import spread

        check_mesh(job, plan.mesh)
        return _every_step(
            *spread(model, job, plan, device, group, example, may_skip=find_unused_parameters), job, plan
        )
    initial_weights(model, group)(model, device)
    if job.parity == "bitwise":
        align(model)
    if plan.devices_in_process > 1:
        return _with_copies(model, job, plan, device)
    if job.aggregation.is_infrequent:
        return _with_outer_steps(model, job, plan, device, group)
    # One worker alone is its own server: there is nothing asynchronous about it.
    if job.aggregation.method == "parameter_server_async" and group is not None:
        return AsyncServers(model, job, plan, device, group)
    return _every_step(Whole(model, device, group), None, job, plan)


def _every_step(layout: Whole, runner: Runner | None, job: Job, plan: Plan) -> Engine:
    """The engine of workers that meet in every step."""
    if job.parity == "bitwise":
        return Engine(layout, FixedOrderSum(layout), runner)
    if layout.replicas is None:
        return Engine(layout, RunningSum(layout, None), runner)
    aggregation = _aggregation(layout, layout.replicas, job, plan)
    engine = Engine(layout, RunningSum(layout, aggregation.aggregator), runner, aggregation.notes)
    engine.algorithm = aggregation.algorithm
    return engine


def _with_copies(model: nn.Module, job: Job, plan: Plan, device: torch.device) -> Engine:
    if job.parity == "bitwise":
        raise JobError(
            "parity = 'bitwise' needs the strategy dp: dp_one_process is equal up to rounding only; use "
            "parity = 'numeric'."
        )
    layout = Whole(model, device, None)
    copies = Copies(model, devices_of_process(plan, device), layout.zero)
    return Engine(layout, RunningSum(layout, None), copies, [copies.note])


def _with_outer_steps(
    model: nn.Module, job: Job, plan: Plan, device: torch.device, group: dist.ProcessGroup | None
) -> Engine:
    """An engine of workers that each train alone, and average their weights every few steps."""
    layout = Whole(model, device, None)
    if group is None:
        return OuterSteps(layout, job.aggregation, None, None)
    aggregation = _aggregation(layout, group, job, plan)
    engine = OuterSteps(layout, job.aggregation, group, aggregation.aggregator, aggregation.notes)
    engine.algorithm = aggregation.algorithm
    return engine


def _aggregation(layout: Whole, replicas: dist.ProcessGroup, job: Job, plan: Plan) -> Aggregation:
    return set_up_aggregation(job, plan, open_links(replicas, layout.device, plan.timeout_s))
