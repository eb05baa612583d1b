"""Gradients travel in buckets while backward goes on: what of that a step has to wait for."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.plan.step_time import queue_s

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel collects before it sends (Li et al. 2020, "PyTorch Distributed", section 4.2)."""
BACKWARD_SHARE = 2 / 3
"""Of a pass: backward multiplies twice where forward multiplies once."""


def num_buckets(size_bytes: float) -> int:
    return max(1, math.ceil(size_bytes / BUCKET_BYTES))


def sums_s(size_bytes: float, sum_s: Callable[[float], float]) -> float:
    """Seconds of all sums, one a bucket of equal size; `sum_s` prices one of so many bytes."""
    count = num_buckets(size_bytes)
    return count * sum_s(size_bytes / count)


def exposed_s(compute_s: float, size_bytes: float, all_sums_s: float) -> float:
    """What of `all_sums_s` lies behind the end of a pass of `compute_s`.

    Bucket j of n is ready after forward and j / n of backward, and travels when those before it have arrived. The last
    one is never hidden, and nothing travels during forward: no smooth maximum says that.
    """
    count = num_buckets(size_bytes)
    ready_s = [compute_s * (1 - BACKWARD_SHARE * (count - bucket) / count) for bucket in range(1, count + 1)]
    return queue_s(ready_s, [all_sums_s / count] * count) - compute_s
