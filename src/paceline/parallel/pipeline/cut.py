"""Finds where to cut a model into stages that take equally long and fit into memory."""

from __future__ import annotations

import math

import torch

from paceline.errors import ModelError
from paceline.parallel.pipeline.layer_costs import measure_layers
from paceline.parallel.pipeline.recording import Recording
from paceline.partition import StageLimits, best_cut, micro_batches_in_flight
from paceline.spec import Mesh, PipelineSpec


def stage_limits(
    mesh: Mesh,
    pipeline: PipelineSpec,
    num_micro_batches: int,
    memory_bytes: float,
    *,
    optimizer_copies: int,
    micro_batch_share: float = 1.0,
    recomputes: bool = False,
) -> StageLimits:
    """What stages have to respect so that each fits into a worker's memory.

    A worker holds parameters, gradients and the optimizer's state in parts along tp and fsdp, below stage 3 of ZeRO the
    gathered parameters too, and the activations of as many micro-batches as its schedule has under way at once.
    Activations count as if tp shared all of them, and not at all where they are computed again; but what one layer
    keeps as its output and the next as its input counts twice, and 16-bit precisions as 32 bits.

    Args:
        memory_bytes: of one worker; infinite where it is unknown.
        optimizer_copies: numbers that the optimizer keeps for each parameter.
        micro_batch_share: a micro-batch, in those that the layers were measured with.
    """
    if math.isinf(memory_bytes) or pipeline.stages_per_worker > 1:  # a worker's stages share what there is
        return StageLimits()
    copies = (2 + optimizer_copies) / mesh.fsdp + (mesh.fsdp > 1 and mesh.zero_stage < 3)
    share = 0.0 if recomputes else micro_batch_share / mesh.tp
    return StageLimits(
        memory_bytes=memory_bytes,
        copies_of_parameters=copies / mesh.tp,
        micro_batches_kept=tuple(
            share * micro_batches_in_flight(mesh.pp, worker, num_micro_batches, pipeline.schedule)
            for worker in range(mesh.pp)
        ),
    )


def find_cut(
    recording: Recording, num_stages: int, limits: StageLimits, device: torch.device
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The first layer of every stage for stages of equal measured time, and a note where they may not fit.

    Raises:
        ModelError: the model has too few layers.
    """
    costs = measure_layers(recording, device)
    try:
        return best_cut(costs, num_stages, limits), ()
    except ModelError as problem:  # what layers keep is an upper bound: what does not fit by it may fit
        return best_cut(costs, num_stages), (str(problem),)
