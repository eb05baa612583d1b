"""Gradients are summed in buckets during backward: the exposed part of that communication."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.spec.algorithm import BUCKET_BYTES

BACKWARD_SHARE = 2 / 3
"""The fraction of a pass that backward takes: it multiplies twice where forward multiplies once."""


def num_buckets(size_bytes: float) -> int:
    return max(1, math.ceil(size_bytes / BUCKET_BYTES))


def sums_s(size_bytes: float, sum_s: Callable[[float], float]) -> float:
    """Seconds of all sums, one per bucket of equal size; `sum_s` gives the time for a number of bytes."""
    count = num_buckets(size_bytes)
    return count * sum_s(size_bytes / count)


def exposed_s(compute_s: float, size_bytes: float, all_sums_s: float) -> float:
    """The part of `all_sums_s` that is exposed after the end of a pass of `compute_s`.

    Bucket j of n is ready after forward and j / n of backward, and travels when those before it have arrived (Zhang et
    al. 2017, "Poseidon", wait-free backpropagation). Nothing travels during forward, and the last one is never hidden:
    buckets of equal size become ready at equal distances, so the queue either is empty whenever one comes, and one
    transfer is left in the end, or never, and all of them lie behind the first bucket.
    """
    return max(all_sums_s / num_buckets(size_bytes), all_sums_s - _behind_first_s(compute_s, size_bytes))


def sums_of_exposed_s(compute_s: float, size_bytes: float, waiting_s: float) -> float:
    """How long all sums take, if so much of them lies behind the end of a pass: the inverse of `exposed_s`."""
    return min(waiting_s * num_buckets(size_bytes), waiting_s + _behind_first_s(compute_s, size_bytes))


def _behind_first_s(compute_s: float, size_bytes: float) -> float:
    """The remaining time of a pass when its first bucket is ready."""
    count = num_buckets(size_bytes)
    return compute_s * BACKWARD_SHARE * (count - 1) / count
