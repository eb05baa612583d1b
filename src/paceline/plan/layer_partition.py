"""A model as the planner sees it: layers in a row, and the cut of a row into stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from paceline.partition import LayerCost, StageLimits, best_cut


@dataclass(frozen=True)
class Layer:
    """One layer that pipelines do not cut. Bytes are those of one sample."""

    num_parameters: float
    time: float
    """Of a forward and backward pass, in whatever unit all layers of a model have in common."""
    kept_bytes: float
    """Activations that the backward pass waits for, in whatever unit all layers have in common."""
    output_bytes: float
    """What the next layer is given."""
    num_parts: int = 1
    """Heads, groups or output channels: what tensor parallelism shares out; 1: every worker computes the layer."""
    num_sums: int = 0
    """Sums over a tensor group, forward and backward, …"""
    sum_bytes: float = 0.0
    """… of so many bytes each."""
    gathered_bytes: float = 0.0
    """What a tensor group gathers of its parts, forward and backward."""
    whole_share: float = 1.0
    """Of `kept_bytes`, what each worker of a tensor group keeps whole."""

    def is_shared_by(self, degree: int) -> bool:
        return self.num_parts >= degree and self.num_parts % degree == 0


Layers = tuple[Layer, ...]


@lru_cache(maxsize=256)
def cut(layers: Layers, num_stages: int) -> tuple[Layers, ...]:
    """Neighbouring layers in `num_stages` stages, none empty, the slowest of which is as fast as can be."""
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot make {num_stages} stages")
    return cut_within(layers, num_stages, [0.0] * len(layers), [0.0] * len(layers), StageLimits())


def cut_within(
    layers: Layers, num_stages: int, state_bytes: Sequence[float], kept_bytes: Sequence[float], limits: StageLimits
) -> tuple[Layers, ...]:
    """The same among those whose stages keep the limits.

    Args:
        state_bytes, kept_bytes: of every layer on a worker, parameters with what belongs to them, and activations.

    Raises:
        ModelError: there is none.
    """
    arriving = [0.0, *(layer.output_bytes for layer in layers[:-1])]
    costs = [
        LayerCost(str(place), layer.time, held, kept, sent)
        for place, (layer, held, kept, sent) in enumerate(zip(layers, state_bytes, kept_bytes, arriving, strict=True))
    ]
    starts = best_cut(costs, num_stages, limits)
    return tuple(layers[start:stop] for start, stop in pairwise((*starts, len(layers))))


def slowest_share(stages: Sequence[Layers]) -> float:
    """The part of the whole pass that the slowest stage computes."""
    times = [sum(layer.time for layer in stage) for stage in stages]
    return max(times) / sum(times)


def shared_time(layers: Layers, tp: int) -> float:
    """What a worker of a tensor group computes of the layers' time, as a part of it; the rest is not shared out."""
    whole = sum(layer.time for layer in layers)
    return sum(layer.time / (tp if layer.is_shared_by(tp) else 1) for layer in layers) / whole
