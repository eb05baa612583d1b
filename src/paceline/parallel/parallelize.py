"""Builds the engine that trains a model on all workers from a job and a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.aggregation import set_up_aggregation
from paceline.parallel.async_servers import AsyncServers, describe_asynchrony
from paceline.parallel.bitwise import BitwiseDataParallel
from paceline.parallel.dp import DataParallel
from paceline.parallel.engine import Engine
from paceline.parallel.initial_weights import align, initial_weights, is_on_meta
from paceline.parallel.local_sgd import LocalSGD, aggregator_inside_node, describe_outer_steps
from paceline.parallel.micro_batch import check_automatic
from paceline.parallel.one_process import OneProcessDataParallel, describe_one_process, devices_of_process
from paceline.spec import AlgorithmName, Job, Plan, check_mesh


@dataclass(frozen=True)
class Parallelized:
    """A model that is tied to its copies on the other workers."""

    engine: Engine
    algorithm: AlgorithmName
    """The plan's algorithm, or the choice of "auto"."""
    notes: tuple[str, ...]
    """Notes for the run's log and report."""
    background: contextlib.ExitStack
    """What runs in the background; left with the error that ends the run, if one does."""


def parallelize(
    model: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    find_unused_parameters: bool = False,
    example: Any = None,
) -> Parallelized:
    """Make `model` train together with its copies on the other workers; a collective of `group`.

    Args:
        example: what the model is called with, for a few samples, as `Run.prepare` takes it; a pipeline is cut by it.

    Raises:
        JobError: a strategy that this job cannot be trained with.
    """
    check_automatic(job, plan, 1 if group is None else dist.get_world_size(group), may_skip=find_unused_parameters)
    if plan.mesh is not None and not plan.mesh.is_plain and group is not None:
        # Torch's parts for it take long to load, and most runs need none of them.
        from paceline.parallel.axes import open_axes
        from paceline.parallel.bitwise_sharded import BitwiseSharded
        from paceline.parallel.mesh import MeshParallel
        from paceline.parallel.pipeline import ModelCall

        check_mesh(job, plan.mesh)
        axes = open_axes(plan.mesh, device, group)
        if job.parity == "bitwise":
            sharded = BitwiseSharded(model, job, plan, device, axes, may_skip=find_unused_parameters)
            return Parallelized(sharded, plan.algorithm, tuple(sharded.notes), contextlib.ExitStack())
        call = None if example is None else ModelCall.of(example)
        meshed = MeshParallel(model, job, plan, device, axes, call, may_skip=find_unused_parameters)
        return Parallelized(meshed, meshed.algorithm, tuple(meshed.notes), _closing(meshed.close))
    if is_on_meta(model) or job.parity == "bitwise":
        initial_weights(model, group)(model, device)
        align(model)
    if plan.devices_in_process > 1:
        one = OneProcessDataParallel(model, job, plan, devices_of_process(plan, device))
        return Parallelized(one, plan.algorithm, (describe_one_process(plan.devices_in_process),), _closing(one.close))
    spec = job.aggregation
    if job.parity == "bitwise":
        return Parallelized(BitwiseDataParallel(model, device, group), plan.algorithm, (), contextlib.ExitStack())
    if spec.method == "parameter_server_async" and group is not None:
        asynchronous = AsyncServers(model, job, plan, device, group)
        servers = contextlib.ExitStack()
        servers.push(asynchronous.close)
        return Parallelized(asynchronous, plan.algorithm, (describe_asynchrony(spec, plan),), servers)
    with contextlib.ExitStack() as on_error:
        algorithm, aggregator = plan.algorithm, None
        notes: list[str] = []
        if group is not None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            aggregation = set_up_aggregation(job, plan, device, group, trained)
            algorithm, aggregator, notes = aggregation.algorithm, aggregation.aggregator, list(aggregation.notes)
            on_error.callback(aggregator.scheduler.close)
        engine: Engine
        # One worker alone is its own server: there is nothing asynchronous about it.
        if spec.method in ("every_step", "parameter_server_async"):
            engine = DataParallel(model, job, plan, device, group, aggregator, find_unused_parameters)
        else:
            inside = None
            if spec.sync_inside_nodes and aggregator is not None:
                inside = aggregator_inside_node(aggregator.links, plan)
            if inside is not None:
                on_error.callback(inside.scheduler.close)
            notes.append(describe_outer_steps(spec))
            engine = LocalSGD(model, job, plan, device, aggregator, inside, find_unused_parameters)
        return Parallelized(engine, algorithm, tuple(notes), on_error.pop_all())


def _closing(close: Callable[[], None]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.callback(close)
    return stack
