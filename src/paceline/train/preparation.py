"""A script's model and optimizer made ready to train together with their copies on the other workers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.containers import to_device
from paceline.parallel import parallelize
from paceline.parallel.initial_weights import is_on_meta
from paceline.spec import AlgorithmName, Job, Mesh, Plan
from paceline.train.compilation import check_can_be_compiled, draws_as_uncompiled, without_compiler
from paceline.train.numerics import Precision
from paceline.train.optim import choose_kernels
from paceline.train.process_group import World
from paceline.train.schedule import LearningRates
from paceline.train.state import Names, Trained, rebind


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to train, and what was found out about it."""

    trained: Trained
    rates: LearningRates
    algorithm: AlgorithmName
    """The plan's algorithm, or the choice of "auto"."""
    notes: tuple[str, ...]
    """Notes for the run's log and report."""
    background: ExitStack
    """What runs in the background; left with the error that ends the run, if one does."""


def prepare_model(
    model: nn.Module,
    optimizer: Optimizer,
    job: Job,
    plan: Plan,
    world: World,
    precision: Precision,
    *,
    find_unused_parameters: bool,
    example: Any,
) -> Prepared:
    """Place `model` on this worker's device and tie it to its copies; a collective. The arguments are `Run.prepare`'s.

    Raises:
        JobError: a strategy that this job cannot be trained with.
        ModelError: an optimizer that is not this model's.
    """
    is_plain = (plan.mesh or Mesh()).is_plain
    model, compile_again = without_compiler(model, job)
    if compile_again is not None:
        check_can_be_compiled(job, plan)
    rates = LearningRates(job, optimizer)
    names = Names.of(optimizer, model)
    if not is_on_meta(model) and is_plain:
        model.to(world.device)
    if job.precision == "float64":
        model.double()
    if job.channels_last and is_plain:  # torch shards parameters of the plain format only
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    parallelized = parallelize(
        model,
        job,
        plan,
        world.device,
        world.group,
        find_unused_parameters=find_unused_parameters,
        example=to_device(example, world.device, torch.float64 if job.precision == "float64" else None),
    )
    trained = Trained(optimizer, names, parallelized.engine, precision)
    if compile_again is not None:
        compile_again(trained.model)
        parallelized.background.enter_context(draws_as_uncompiled())
    rebind(optimizer, names, trained.model)
    choose_kernels(optimizer, world.device)
    return Prepared(trained, rates, parallelized.algorithm, parallelized.notes, parallelized.background)
