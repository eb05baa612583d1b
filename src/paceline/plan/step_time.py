"""How long one training step takes: computing, summing gradients, loading data, and what is lost between them.

The forward and backward pass, the sum of the gradients and the loader are three pipelines that work at once, but for a
worker that makes its batches itself. The sum begins as soon as the backward pass has finished a bucket, so it hides
behind computing, but for its last bucket. Then the slowest worker is waited for, and the optimizer steps.

Formulas take numbers, or arrays of one shape for many steps at once. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.plan.model import Layout, StepForecast
from paceline.spec.forecast import BoundBy

_FLOOR_SHARPNESS = 8.0
"""How abruptly launching kernels stops to be the limit as a micro-batch grows; 8 adds 9 % where both are equal."""

INTERVAL_SIGMAS = 1.645
"""Standard deviations to either side in which a normal quantity is nine times of ten."""


@dataclass(frozen=True)
class ComputeTime:
    """Forward and backward pass of a micro-batch: fixed_s + per_sample_s * samples, but floor_s at least."""

    fixed_s: float
    per_sample_s: float
    floor_s: float = 0.0
    """What launching the kernels takes, however little they do."""

    def seconds(self, micro_batch_size: float) -> float:
        return float(compute_s(micro_batch_size, self.fixed_s, self.per_sample_s, self.floor_s))


def compute_s(micro_batch_size: Any, fixed_s: float, per_sample_s: float, floor_s: float = 0.0) -> Any:
    """max(floor_s, fixed_s + per_sample_s * micro_batch_size), rounded off at the corner so that it can be fitted."""
    return smooth_max(fixed_s + per_sample_s * micro_batch_size, floor_s, _FLOOR_SHARPNESS)


def compute_from_flops(num_flops_per_sample: float, flops_per_s: float, efficiency: float = 0.3) -> ComputeTime:
    """Where nothing was measured: the floating-point operations of a forward and backward pass over what a device does.

    Args:
        flops_per_s: by the datasheet.
        efficiency: the part that training reaches; 0.2 to 0.5 is common (Chowdhery et al. 2022, "PaLM", table 3).
    """
    return ComputeTime(0.0, num_flops_per_sample / (efficiency * flops_per_s))


def fit_compute(micro_batch_sizes: Sequence[int], seconds: Sequence[float]) -> ComputeTime:
    """The line through measured micro-batches with the smallest relative errors, neither part below zero.

    One timing does not tell the fixed part from the part of each sample: all is taken to grow with the samples.
    """
    sizes, times = np.asarray(micro_batch_sizes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    lines = []
    for kept in ([0, 1], [1], [0]) if len(set(micro_batch_sizes)) > 1 else ([1],):
        part = columns[:, kept]
        solution = np.zeros(2)
        solution[kept] = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
        if (solution >= 0).all():
            lines.append((float(np.square(columns @ solution - 1).sum()), solution))
    fixed_s, per_sample_s = min(lines, key=lambda line: line[0])[1]
    return ComputeTime(float(fixed_s), float(per_sample_s))


def smooth_max(one: Any, other: Any, exponent: float) -> Any:
    """(one^e + other^e)^(1/e): the sum for e = 1, the maximum for e -> infinity (Qiao et al. 2021, "Pollux", 3.2)."""
    if math.isinf(exponent):
        return np.maximum(one, other)
    top = np.maximum(np.maximum(one, other), 1e-300)  # divided out, so that no power overflows
    return top * ((one / top) ** exponent + (other / top) ** exponent) ** (1 / exponent)


def overlapped_s(compute: Any, communication: Any, exponent: float, tail_fraction: float = 0.0) -> Any:
    """Both pipelines together, where no bucket is known by itself.

    Args:
        exponent: 1: nothing overlaps; infinity: everything does.
        tail_fraction: the part of communication that begins after the backward pass has ended: its last bucket.
    """
    return smooth_max(compute, (1 - tail_fraction) * communication, exponent) + tail_fraction * communication


@lru_cache(maxsize=4096)
def expected_maximum(num_workers: int) -> float:
    """Of so many independent standard normal numbers: 0 for one, 0.564 for two, about sqrt(2 ln n) for many.

    The integral of 1 - F(x)^n - (1 - F(x))^n over x > 0, with F the normal distribution (David and Nagaraja 2003,
    "Order Statistics", 3.1), by Simpson's rule.
    """
    if num_workers == 1:
        return 0.0
    num_steps, end = 400, 10.0
    x = np.linspace(0.0, end, num_steps + 1)
    upper = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in x])
    rest = -np.expm1(num_workers * np.log1p(-upper)) - upper**num_workers
    weights = np.ones(num_steps + 1)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return float((weights * rest).sum() * end / num_steps / 3)


def slowest_s(compute: Any, spread: float, expected_maximum_of_workers: Any) -> Any:
    """The slowest worker's computing time, where one worker's varies by `spread`, its standard deviation over its mean,
    and all wait for the last (Dean and Barroso 2013, "The Tail at Scale")."""
    return compute * (1 + spread * expected_maximum_of_workers)


@dataclass(frozen=True)
class StepModel:
    """What is known of one job's step, but for communication."""

    compute: ComputeTime
    overlap_exponent: float = 6.0
    tail_fraction: float = 0.03
    straggler_spread: float = 0.0
    """Standard deviation over mean of one worker's computing time."""
    neighbour_slowdown: float = 0.0
    """Many workers on a node share its memory, power and cores: each computes slower by up to this part."""
    overhead_s: float = 0.0
    """Optimizer and launch overhead of a step."""
    loader_samples_per_s: float | None = None
    """What the loader of one node delivers to all its workers; None: never the limit."""
    loads_between_passes: bool = False
    """Whether a worker makes each batch itself before it computes; else that goes on meanwhile."""
    error: float = 0.0
    """Standard deviation of log(measured / forecast), for the interval."""


def local_compute_s(model: StepModel, micro_batch_size: float, layout: Layout, num_micro_steps: int = 1) -> float:
    """What an average worker on the fullest node computes in a step."""
    g = max(layout.workers_per_node)
    return (
        num_micro_steps
        * model.compute.seconds(micro_batch_size)
        * float(neighbours_factor(model.neighbour_slowdown, g))
    )


def neighbours_factor(slowdown: Any, num_on_node: Any) -> Any:
    """1 alone on a node, 1 + slowdown among many: what the others take of what all share."""
    return 1 + slowdown * (1 - 1 / num_on_node)


def neighbour_slowdown(factor: float, num_on_node: int) -> float:
    """The slowdown that explains how many times as long a worker takes among so many on its node as it does alone."""
    return max(0.0, factor - 1) / (1 - 1 / num_on_node) if num_on_node > 1 else 0.0


def forecast_step(
    model: StepModel, layout: Layout, micro_batch_size: float, communication_s: float, num_micro_steps: int = 1
) -> StepForecast:
    """One step with `num_micro_steps` micro-batches, of which the last one's backward pass hides communication."""
    mean_s = local_compute_s(model, micro_batch_size, layout, num_micro_steps)
    waiting_s = slowest_s(mean_s, model.straggler_spread, expected_maximum(layout.num_workers)) - mean_s
    accumulating_s = mean_s * (num_micro_steps - 1) / num_micro_steps
    last_s = mean_s - accumulating_s + waiting_s
    device_s = accumulating_s + overlapped_s(last_s, communication_s, model.overlap_exponent, model.tail_fraction)
    num_samples = micro_batch_size * num_micro_steps * max(layout.workers_per_node)
    loader_s = 0.0 if model.loader_samples_per_s is None else num_samples / model.loader_samples_per_s
    overhead_s = model.overhead_s + waiting_s
    busy_s = device_s + model.overhead_s
    total_s = busy_s + loader_s if model.loads_between_passes else max(busy_s, loader_s)
    width = math.exp(INTERVAL_SIGMAS * model.error)
    return StepForecast(
        total_s=float(total_s),
        compute_s=float(mean_s),
        communication_s=float(communication_s),
        exposed_s=float(device_s - mean_s - waiting_s),
        loader_s=float(loader_s),
        overhead_s=float(overhead_s),
        bound_by=bound_by(mean_s, communication_s, loader_s, overhead_s, total_s, model.loads_between_passes),
        low_s=float(total_s / width),
        high_s=float(total_s * width),
    )


def bound_by(
    compute: float,
    communication: float,
    loader: float,
    overhead: float,
    total: float,
    loads_between_passes: bool = False,
) -> BoundBy:
    """The pipeline that the step waits for: what would have to become faster for the step to do so."""
    longest = max(compute, communication, overhead)
    if loader >= total or (loads_between_passes and loader > longest):
        return "loader"
    if longest == compute:
        return "compute"
    return "communication" if longest == communication else "overhead"
