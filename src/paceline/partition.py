"""Pipeline stages: where to cut a sequence of layers, and how many micro-batches a stage has in flight.

The slowest stage sets the pace of a pipeline, so the best cut is the one whose slowest stage is fastest, among those
whose stages fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from paceline.errors import ModelError
from paceline.spec.mesh import ScheduleName
from paceline.spec.model_cost import LayerCost, Layers


@dataclass(frozen=True)
class StageLimits:
    """What a cut has to respect."""

    memory_bytes: float = math.inf
    """Memory for one stage: its parameters with all that is kept beside them, and activations."""
    copies_of_parameters: float = 4.0
    """Parameters, gradients and the optimizer's state, in parameters: 4 for Adam."""
    micro_batches_kept: tuple[float, ...] = ()
    """How many micro-batches' activations each stage keeps at once; empty: one."""
    messages_kept: float = 0.0
    """How many times each stage holds the output of the stage before it, and its own output's gradient: while they
    arrive."""


def micro_batches_in_flight(
    num_workers: int,
    worker: int,
    num_micro_batches: int,
    schedule: ScheduleName = "1f1b",
    stages_per_worker: int = 1,
) -> float:
    """Micro-batches whose activations a worker of a pipeline keeps at once, in all of its layers.

    GPipe: all. 1F1B: min(p - r, m); with v stages, each a v-th of the layers, 2 (p - r - 1) + (v - 1) p + 1 of them
    (Narayanan et al. 2021, 2.2). Zero bubble: on every worker as many as 1F1B's first (Qi et al. 2023, ZB-H1).
    """
    p, m, v = num_workers, num_micro_batches, stages_per_worker
    if schedule == "gpipe":
        return m
    stages_behind = p - 1 if schedule == "zero_bubble" else p - worker - 1
    if v > 1:
        return min(m * v, 2 * stages_behind + (v - 1) * p + 1) / v
    return min(stages_behind + 1, m)


def forward_order(num_workers: int, num_micro_batches: int, stages_per_worker: int) -> list[tuple[int, int]]:
    """(place of a stage among its worker's, micro-batch): groups of num_workers micro-batches, place by place."""
    return [
        (place, micro_batch)
        for start in range(0, num_micro_batches, num_workers)
        for place in range(stages_per_worker)
        for micro_batch in range(start, min(start + num_workers, num_micro_batches))
    ]


@dataclass(frozen=True)
class InFlight:
    """What a worker keeps when backward begins in one of its stages."""

    place: int
    """Which of the worker's stages it is, counted from 0."""
    micro_batches: tuple[float, ...]
    """[place]: micro-batches whose activations the stage keeps, with the one that backward goes through."""


@lru_cache(maxsize=4096)
def in_flight_by_stage(
    num_workers: int, worker: int, num_micro_batches: int, schedule: ScheduleName, stages_per_worker: int
) -> tuple[InFlight, ...]:
    """What a worker keeps of each of its stages, at all the moments of a step where that is most.

    One stage keeps `micro_batches_in_flight`. Several do not keep equally many: the worker is ahead of its backward
    passes by a fixed number of forward passes, which go through its stages in turn, and backward takes them in the
    opposite order.
    """
    most = micro_batches_in_flight(num_workers, worker, num_micro_batches, schedule, stages_per_worker)
    if stages_per_worker == 1:
        return (InFlight(0, (most,)),)
    ahead = round(most * stages_per_worker)
    # After a group of micro-batches everything repeats; the worker is ahead by less than two groups.
    forwards = [p for p, _ in forward_order(num_workers, min(num_micro_batches, 3 * num_workers), stages_per_worker)]
    backwards = [stages_per_worker - 1 - place for place in forwards]
    moves = list(zip(backwards[: num_workers * stages_per_worker], [*forwards[ahead:], *[None] * ahead], strict=False))
    kept = [forwards[:ahead].count(place) for place in range(stages_per_worker)]
    found = []
    for before, move, behind in zip([None, *moves], moves, [*moves[1:], None], strict=False):
        backward, forward = move
        # While moves are alike, one stage keeps ever less and one ever more: together they keep most at either end.
        if before != move or move != behind:
            found.append(InFlight(backward, tuple(kept)))
        kept[backward] -= 1
        if forward is not None:
            kept[forward] += 1
    return tuple(found)


def half_passes_in_flight(
    num_workers: int, worker: int, num_micro_batches: int, schedule: ScheduleName, stages_per_worker: int = 1
) -> float:
    """The most micro-batches of whose backward pass a worker has done only the first half; 0 in most schedules.

    Zero bubble keeps as many micro-batches on every worker as on the first, and forward passes are ahead by as many as
    in 1F1B: the rest is between its halves, with the one at work. Nobody waits for the first stage's first half. With
    several stages on a worker any that is kept may be.
    """
    if schedule != "zero_bubble":
        return 0
    if stages_per_worker > 1:
        return micro_batches_in_flight(num_workers, worker, num_micro_batches, schedule, stages_per_worker)
    return min(worker + 1, num_micro_batches) if worker else 0


def split(layers: Sequence[LayerCost], starts: Sequence[int]) -> tuple[Layers, ...]:
    """The layers of each stage, whose first layers are at `starts`."""
    return tuple(tuple(layers[start:stop]) for start, stop in pairwise((*starts, len(layers))))


def best_cut(layers: Sequence[LayerCost], num_stages: int, limits: StageLimits = StageLimits()) -> tuple[int, ...]:
    """The first layer of every stage, such that the slowest stage is as fast as it can be; among equals, the cut that
    sends least before it is slower anywhere.

    Dynamic programming over (stages, layers): the best cut of the first j layers into k stages ends with a stage
    i … j - 1 behind the best cut of the first i into k - 1. A stage that is too long or too large only becomes more so
    with a layer more, so few are looked at: some num_layers^2 in all for layers that take equally long.

    Raises:
        ModelError: there are too few layers, or no cut keeps the limits.
    """
    num_layers = len(layers)
    num_places = sum(layer.may_begin for layer in layers[1:]) + bool(layers)
    if num_places < num_stages:
        raise ModelError(
            f"A model of {num_layers} layers that can begin {num_places} stages cannot be cut into {num_stages}; use "
            "fewer workers on the axis pp, or fewer stages per worker."
        )
    times_s = list(accumulate((layer.time_s for layer in layers), initial=0.0))
    parameters = list(accumulate((layer.parameter_bytes for layer in layers), initial=0.0))
    activations = list(accumulate((layer.activation_bytes for layer in layers), initial=0.0))
    arriving = [0.0, *(layer.output_bytes for layer in layers)]
    kept = limits.micro_batches_kept or (1,) * num_stages

    # best[j]: (time of the slowest stage, bytes sent, first layers) of the first j layers.
    best: list[tuple[float, float, tuple[int, ...]]] = [(math.inf, 0, ())] * (num_layers + 1)
    best[0] = (0.0, 0, ())
    for stage in range(num_stages):
        longer: list[tuple[float, float, tuple[int, ...]]] = [(math.inf, 0, ())] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            peak_bytes = 0.0  # of one micro-batch, while backward goes through the stage
            for start in range(stop - 1, stage - 1, -1):
                peak_bytes = layers[start].activation_bytes + max(layers[start].moment_bytes, peak_bytes)
                time_s = times_s[stop] - times_s[start]
                held_bytes = limits.copies_of_parameters * (parameters[stop] - parameters[start])
                kept_bytes = activations[stop] - activations[start]
                held_bytes += kept[stage] * kept_bytes + max(0.0, peak_bytes - kept_bytes)
                if time_s > longer[stop][0] or held_bytes > limits.memory_bytes:
                    break
                slowest_s, sent_bytes, starts = best[start]
                if math.isinf(slowest_s) or (start and not layers[start].may_begin):
                    continue
                messages = arriving[start] + (arriving[stop] if stop < num_layers else 0.0)
                if held_bytes + limits.messages_kept * messages > limits.memory_bytes:
                    continue
                found_s = max(slowest_s, time_s)
                sent = sent_bytes + arriving[start]
                if (found_s, sent) <= longer[stop][:2]:
                    longer[stop] = (found_s, sent, (*starts, start))
        best = longer
    if not math.isfinite(best[num_layers][0]):
        raise ModelError(
            f"No cut of this model into {num_stages} stages fits into {limits.memory_bytes / 2**30:.2f} GiB of memory "
            "per stage; use more stages, smaller micro-batches (virtual_shards), activation checkpointing or sharding."
        )
    return best[num_layers][2]
