"""What failures cost a long run that saves checkpoints as often as is best."""

from __future__ import annotations

import math

DEVICE_MTBF_S = 50_000 * 3600.0
"""Llama 3 (Dubey et al. 2024, section 3.3.4): 419 unexpected interruptions in 54 days of 16,384 H100."""
RESTART_S = 300.0
"""Seconds to detect a failure, start workers and load a checkpoint."""
_CHECKPOINT_RATE = 1e9
"""Bytes/s at which training stalls for a checkpoint."""


def availability(num_devices: int, checkpoint_bytes: float) -> float:
    """The part of a run that goes into work that lasts, where any device ends it; 0 where it makes no progress.

    With M seconds between failures, checkpoints of delta seconds, restarts of R, after tau seconds of work each it is
    tau / (M e^(R/M) (e^((tau + delta)/M) - 1)), most for tau = sqrt(2 delta M) (1 + sqrt(x) / 3 + x / 9) - delta with
    x = delta / (2 M), and for tau = M where delta reaches 2 M (Daly 2006, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", equations 20 and 37).
    """
    mtbf_s, checkpoint_s = DEVICE_MTBF_S / num_devices, max(checkpoint_bytes / _CHECKPOINT_RATE, 1e-3)
    x = checkpoint_s / (2 * mtbf_s)
    work_s = mtbf_s
    if x < 1:
        work_s = math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s
    exponent = (work_s + checkpoint_s) / mtbf_s
    if exponent + RESTART_S / mtbf_s > 500:
        return 0.0
    return work_s / (mtbf_s * math.exp(RESTART_S / mtbf_s) * math.expm1(exponent))
