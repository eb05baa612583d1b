"""The exposed part of summing gradients in buckets during backward: the time not hidden by computation."""

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

    Bucket j of n is ready after forward and j / n of backward, and is sent when those before it have arrived (Zhang et
    al. 2017, "Poseidon", wait-free backpropagation). Nothing is sent during forward, and the last one is never hidden.
    Buckets of equal size become ready at equal intervals. So either each transfer ends before the next bucket is ready,
    and only the last one is exposed, or the link is never idle after the first bucket is ready.
    """
    return max(all_sums_s / num_buckets(size_bytes), all_sums_s - _behind_first_s(compute_s, size_bytes))


def sums_of_exposed_s(compute_s: float, size_bytes: float, waiting_s: float) -> float:
    """The time of all sums whose exposed part is `waiting_s`: the inverse of `exposed_s`."""
    return min(waiting_s * num_buckets(size_bytes), waiting_s + _behind_first_s(compute_s, size_bytes))


def _behind_first_s(compute_s: float, size_bytes: float) -> float:
    """The remaining time of a pass when its first bucket is ready."""
    count = num_buckets(size_bytes)
    return compute_s * BACKWARD_SHARE * (count - 1) / count
