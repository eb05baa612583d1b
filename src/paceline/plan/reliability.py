"""What failures cost a long run that saves checkpoints as often as is best (Daly 2006, "A higher order estimate of the
optimum checkpoint interval for restart dumps")."""

from __future__ import annotations

import math

DEVICE_MTBF_S = 50_000 * 3600.0
"""Llama 3 (Dubey et al. 2024, section 3.3.4): 419 unexpected interruptions in 54 days of 16,384 H100."""
RESTART_S = 300.0
"""Seconds to detect a failure, start workers and load a checkpoint."""
_CHECKPOINT_RATE = 1e9
"""Bytes/s at which training stalls for a checkpoint."""


def availability_of(num_nodes: int, devices_per_node: int, checkpoint_bytes: float) -> float:
    """The part of a long run that goes into work that lasts, on nodes that fail with any of their devices."""
    return availability(
        DEVICE_MTBF_S / devices_per_node / num_nodes, max(checkpoint_bytes / _CHECKPOINT_RATE, 1e-3), RESTART_S
    )


def availability(mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """The part of a long run that goes into work that lasts, with Daly's interval between checkpoints; 0 where it
    makes no progress.

    Args:
        mtbf_s: mean time between failures of all nodes together.
        checkpoint_s: seconds that training stalls to write a checkpoint.
        restart_s: seconds from a failure to the first step after it.
    """
    if math.isinf(mtbf_s):
        return 1.0
    interval_s = daly_interval_s(checkpoint_s, mtbf_s)
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 500:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))  # equation 20


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that take delta seconds, which lose least.

    sqrt(2 delta M) (1 + sqrt(x) / 3 + x / 9) - delta with x = delta / (2 M), and M where delta reaches 2 M (Daly 2006,
    equation 37).
    """
    x = checkpoint_s / (2 * mtbf_s)
    if x >= 1:
        return mtbf_s
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s
