"""How long one training step takes: computing, summing gradients, loading data, and what is lost between them.

The forward and backward pass, the sum of the gradients and the loader are three pipelines that work at once, but for a
worker that makes its batches itself. The sum begins as soon as the backward pass has finished a bucket, so it hides
behind computing, but for its last bucket. Then the slowest worker is waited for, and the optimizer steps.

Formulas take numbers, or arrays of one shape for many steps at once. Times are in seconds.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.spec.forecast import BoundBy

INTERVAL_SIGMAS = 1.645
"""Standard deviations to either side of the 90 % interval of a normal quantity."""


def smooth_max(one: Any, other: Any, exponent: float) -> Any:
    """(one^e + other^e)^(1/e): the sum for e = 1, the maximum for e -> infinity (Qiao et al. 2021, "Pollux", 3.2)."""
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
    """The mean of the maximum of n independent standard normal numbers: 0 for one, 0.564 for two, about sqrt(2 ln n).

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


def neighbours_factor(slowdown: Any, num_on_node: Any) -> Any:
    """How many times as long a worker computes: 1 by itself on a node, nearly 1 + slowdown among many, which share
    memory and power."""
    return 1 + slowdown * (1 - 1 / num_on_node)


def neighbour_slowdown(factor: float, num_on_node: int) -> float:
    """The slowdown with which `neighbours_factor` gives `factor` for so many workers on a node."""
    return max(0.0, factor - 1) / (1 - 1 / num_on_node) if num_on_node > 1 else 0.0


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
