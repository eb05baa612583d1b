"""Where to cut a chain of layers into stages of equal time: pure arithmetic on what was measured.

The slowest stage sets the pace of a pipeline, so the best cut is the one whose slowest stage is fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ModelError


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes for one micro-batch."""

    name: str
    time_s: float
    """Forward and backward."""
    parameter_bytes: int = 0
    activation_bytes: int = 0
    """What it keeps from its forward for its backward pass."""
    arriving_bytes: int = 0
    """What has to be sent if a stage begins here; as much comes back as gradients."""
    may_begin: bool = True
    """Whether a stage may begin here."""


@dataclass(frozen=True)
class Limits:
    """What a cut has to respect, and what messages cost."""

    memory_bytes: float = math.inf
    """Of one stage: its parameters with all that is kept beside them, and activations."""
    copies_of_parameters: float = 4.0
    """Parameters, gradients and the optimizer's state, in parameters: 4 for Adam."""
    micro_batches_kept: tuple[int, ...] = ()
    """How many micro-batches' activations a stage keeps at once; empty: one."""
    bytes_per_s: float = math.inf
    """Of the link between two stages; its time counts as the stage's that receives."""


def best_cut(layers: Sequence[LayerCost], num_stages: int, limits: Limits = Limits()) -> tuple[int, ...]:
    """The first layer of every stage, such that the slowest stage is as fast as it can be; among equals, the cut that
    sends least before it is slower anywhere.

    Dynamic programming over (stages, layers): the best cut of the first j layers into k stages ends with a stage
    i … j - 1 behind the best cut of the first i into k - 1. O(num_stages * layers^2).

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
    times_s = _sums([layer.time_s for layer in layers])
    parameters = _sums([layer.parameter_bytes for layer in layers])
    activations = _sums([layer.activation_bytes for layer in layers])
    kept = limits.micro_batches_kept or (1,) * num_stages

    def cost(stage: int, start: int, stop: int) -> float:
        if start and not layers[start].may_begin:
            return math.inf
        held_bytes = limits.copies_of_parameters * (parameters[stop] - parameters[start])
        held_bytes += kept[stage] * (activations[stop] - activations[start])
        if held_bytes > limits.memory_bytes:
            return math.inf
        return times_s[stop] - times_s[start] + 2 * layers[start].arriving_bytes / limits.bytes_per_s

    # best[j]: (time of the slowest stage, bytes sent, first layers) of the first j layers.
    best: list[tuple[float, int, tuple[int, ...]]] = [(math.inf, 0, ())] * (num_layers + 1)
    best[0] = (0.0, 0, ())
    for stage in range(num_stages):
        longer: list[tuple[float, int, tuple[int, ...]]] = [(math.inf, 0, ())] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stage, stop):
                slowest_s, sent_bytes, starts = best[start]
                if slowest_s <= longer[stop][0]:
                    found = max(slowest_s, cost(stage, start, stop))
                    sent = sent_bytes + (layers[start].arriving_bytes if start else 0)
                    if (found, sent) < longer[stop][:2]:
                        longer[stop] = (found, sent, (*starts, start))
        best = longer
    if not math.isfinite(best[num_layers][0]):
        raise ModelError(
            f"No cut of this model into {num_stages} stages fits into {limits.memory_bytes / 2**30:.2f} GiB of memory "
            "per stage; use more stages, smaller micro-batches or activation checkpointing."
        )
    return best[num_layers][2]


def _sums(values: Sequence[float]) -> list[float]:
    """Of the first 0, 1, 2 … of them."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def cut_table(layers: Sequence[LayerCost], starts: Sequence[int], num_workers: int) -> str:
    """The cut for people: a line a stage, with its layers, its share of the time, and what it is sent."""
    stops = [*starts[1:], len(layers)]
    total_s = sum(layer.time_s for layer in layers) or 1.0
    rows = [("stage", "worker", "layers", "first", "last", "time", "ms", "parameters", "receives")]
    for stage, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        part = layers[start:stop]
        time_s = sum(layer.time_s for layer in part)
        rows.append(
            (
                str(stage),
                str(stage % num_workers),
                str(len(part)),
                part[0].name,
                part[-1].name,
                f"{time_s / total_s:.1%}",
                f"{time_s * 1e3:.2f}",
                f"{sum(layer.parameter_bytes for layer in part) / 1e6:.2f} MB",
                f"{part[0].arriving_bytes / 1e3:.1f} kB" if stage else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
