"""Time an algorithm on the present links, and fit a line through the timings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.aggregator import Algorithm
from paceline.comm.links import Links
from paceline.process_groups import device_of
from paceline.spec.algorithm import AlphaBeta


def fit_cost(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """The line with the least relative error through the timings, neither constant below zero.

    Relative, because timings span orders of magnitude and all of them matter alike. One timing alone is taken to be all
    bandwidth.

    Raises:
        ValueError: no timing, or one that is not positive.
    """
    if not times_s or min(times_s) <= 0:
        raise ValueError("a fit needs positive timings")
    # Least squares on 1 = alpha / t + beta * n / t, by its two normal equations.
    a = [1 / t for t in times_s]
    b = [n / t for n, t in zip(sizes_bytes, times_s, strict=True)]
    aa, bb, ab = sum(x * x for x in a), sum(y * y for y in b), sum(x * y for x, y in zip(a, b, strict=True))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha = (bb * sum(a) - ab * sum(b)) / determinant
        beta = (aa * sum(b) - ab * sum(a)) / determinant
        if alpha >= 0 and beta >= 0:
            return AlphaBeta(alpha, beta)
        if beta < 0:
            return AlphaBeta(sum(a) / aa, 0.0)
    return AlphaBeta(0.0, sum(b) / bb) if bb else AlphaBeta(sum(a) / aa, 0.0)


def time_sum(algorithm: Algorithm, links: Links, values: Tensor) -> float:
    """Seconds that a sum of `values`, 1-D, takes on the slowest worker, from when all were ready; the same on all."""
    largest(0.0, links.group)  # all are ready
    started = time.perf_counter()
    algorithm(values, links)
    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)
    return largest(time.perf_counter() - started, links.group)


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest of the workers' numbers, for all of them; a collective, so who gets it knows that all came here."""
    if group is None:
        return float(value)
    values = torch.tensor([value], dtype=torch.float64, device=device_of(group))
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return float(values)
