"""Builds the engine that trains a model on all workers from a job and a plan."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.comm import open_links
from paceline.parallel.engine import Engine
from paceline.parallel.engines.async_servers import AsyncServers
from paceline.parallel.engines.bitwise import BitwiseDataParallel
from paceline.parallel.engines.dp import DataParallel
from paceline.parallel.engines.local_sgd import LocalSGD
from paceline.parallel.engines.one_process import OneProcessDataParallel, devices_of_process
from paceline.parallel.engines.unsuitable_layers import check_complex, check_hooks, check_layers
from paceline.parallel.engines.worker_groups import WorkerGroups
from paceline.parallel.gradients.aggregation import set_up_aggregation
from paceline.parallel.sharding.initial_weights import align, initial_weights, is_on_meta
from paceline.process_groups import open_group
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
        example: what the model is called with, for a few samples, as `Run.prepare` takes it; a pipeline is cut by it.

    Raises:
        JobError: a strategy that this job cannot be trained with.
        ModelError: a layer, or a hook, whose result depends on the number of workers.
    """
    check_layers(model, job, is_alone=group is None and plan.devices_in_process == 1)
    check_complex(model, job, plan)
    check_hooks(model, None if group is None else plan.mesh)
    if plan.mesh is not None and not plan.mesh.is_plain and group is not None:
        # Torch's parts for it take long to load, and most runs need none of them.
        from paceline.parallel.axes import open_axes
        from paceline.parallel.engines.bitwise_mesh import BitwiseMesh
        from paceline.parallel.engines.mesh import MeshParallel
        from paceline.parallel.model_graph import ModelCall

        check_mesh(job, plan.mesh)
        axes = open_axes(plan.mesh, device, group)
        call = None if example is None else ModelCall.of(example)
        engine_of = BitwiseMesh if job.parity == "bitwise" else MeshParallel
        return engine_of(model, job, plan, device, axes, call, may_skip=find_unused_parameters)
    if is_on_meta(model) or job.parity == "bitwise":
        initial_weights(model, group)(model, device)
        align(model)
    if plan.devices_in_process > 1:
        return OneProcessDataParallel(model, job, devices_of_process(plan, device))
    if job.parity == "bitwise" and not job.aggregation.is_infrequent:
        return BitwiseDataParallel(model, device, group, plan.timeout_s)
    # One worker alone is its own server: there is nothing asynchronous about it.
    if job.aggregation.method == "parameter_server_async" and group is not None:
        return AsyncServers(model, job, plan, device, group)
    return _with_sums(model, job, plan, device, group, find_unused_parameters)


def _with_sums(
    model: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None,
    find_unused_parameters: bool,
) -> Engine:
    """An engine that sums gradients every step, or weights every few steps."""
    spec = job.aggregation
    if group is not None and spec.overlap_steps:
        # What a script itself sends between two steps must not meet sums that are still under way.
        group = open_group(range(dist.get_world_size(group)), plan.timeout_s)
    groups = WorkerGroups.open(spec, group, plan.timeout_s) if spec.is_infrequent else None
    with contextlib.ExitStack() as on_error:
        links = aggregation = aggregator = None
        if group is not None and (groups is None or len(groups.members) > 1):
            links = open_links(group if groups is None else groups.across, device, plan.timeout_s)
        if links is not None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            aggregation = set_up_aggregation(job, plan, links, trained)
            aggregator = aggregation.aggregator
            on_error.callback(aggregator.scheduler.close)
        engine: Engine
        if groups is None:
            engine = DataParallel(model, plan, device, group, aggregator, find_unused_parameters)
        else:
            engine = LocalSGD(model, job, plan, device, groups, aggregator, find_unused_parameters)
        if aggregation is not None:
            engine.algorithm, engine.notes = aggregation.algorithm, (*aggregation.notes, *engine.notes)
        on_error.pop_all()
        return engine
