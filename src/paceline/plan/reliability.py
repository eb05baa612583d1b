"""The effect of failures on a long run with the optimal checkpoint interval."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """Failure rate of nodes, and the costs of checkpoints and restarts."""

    node_mtbf_s: float
    """Mean time between failures of one node."""
    checkpoint_s: float
    """Seconds that training stalls to write a checkpoint."""
    restart_s: float
    """Seconds from a failure to the first step after it."""

    def mtbf_s(self, num_nodes: int) -> float:
        """Mean time between failures of a machine that fails whenever one of its nodes does."""
        return self.node_mtbf_s / num_nodes


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that take delta seconds, which lose least.

    sqrt(2 delta M) (1 + sqrt(x) / 3 + x / 9) - delta with x = delta / (2 M), and M where delta reaches 2 M (Daly 2006,
    equation 37).
    """
    x = checkpoint_s / (2 * mtbf_s)
    if x >= 1:
        return mtbf_s
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def expected_run_s(work_s: float, interval_s: float, faults: Faults, num_nodes: int) -> float:
    """M e^(R/M) (e^((tau + delta)/M) - 1) work / tau (Daly 2006, equation 20); inf where it exceeds all bounds."""
    mtbf_s = faults.mtbf_s(num_nodes)
    exponent = (interval_s + faults.checkpoint_s) / mtbf_s
    if exponent + faults.restart_s / mtbf_s > 500:
        return math.inf
    return mtbf_s * math.exp(faults.restart_s / mtbf_s) * math.expm1(exponent) * work_s / interval_s


def availability(faults: Faults, num_nodes: int) -> float:
    """The part of a long run that goes into work that lasts, with Daly's interval; 1 where nothing fails."""
    mtbf_s = faults.mtbf_s(num_nodes)
    if math.isinf(mtbf_s):
        return 1.0
    # Free checkpoints would be written without a pause; a second of work between them is near enough.
    interval_s = max(daly_interval_s(faults.checkpoint_s, mtbf_s), min(1.0, mtbf_s))
    return 1.0 / expected_run_s(1.0, interval_s, faults, num_nodes)
