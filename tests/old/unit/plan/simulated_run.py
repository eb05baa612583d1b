"""A run simulated failure by failure: what the closed forms of `paceline.plan.reliability` are held to."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.plan.reliability import Faults

HOPELESS = 50.0
"""Expected tries of one segment beyond which a run is said never to end."""
MANY = 1024
"""Steps whose sum is drawn at once as a normal number instead of one by one."""


@dataclass(frozen=True)
class RunOutcome:
    """Where the time of one simulated run went, in seconds; the parts add up to the whole."""

    total_s: float
    work_s: float
    """Steps that lasted."""
    checkpoint_s: float
    lost_s: float
    """Work and checkpoints that a failure undid."""
    restart_s: float
    num_failures: int


def simulate_run(
    step_s: NDArray[np.float64], num_steps: int, num_nodes: int, faults: Faults, interval_s: float, *, seed: int = 0
) -> RunOutcome:
    """One run of `num_steps` steps, each as long as one drawn from `step_s`, with failures of single nodes.

    A segment is as many whole steps as fit into `interval_s`, and a checkpoint. Nodes fail independently, with
    exponential times; whoever fails, all go back to the last checkpoint, and a failure during a restart begins it
    again. A run that hardly ever reaches its next checkpoint ends in infinity.
    """
    rng = np.random.default_rng(seed)
    mean_s, deviation_s = float(step_s.mean()), float(step_s.std())

    def sum_of(size: int) -> float:
        """The time of `size` steps drawn from `step_s`; of many of them, by the central limit."""
        if size <= MANY:
            return float(rng.choice(step_s, size).sum())
        return max(0.0, size * mean_s + math.sqrt(size) * deviation_s * float(rng.standard_normal()))

    steps_a_segment = max(1, round(interval_s / mean_s))
    segment_s = steps_a_segment * mean_s + faults.checkpoint_s
    if segment_s / faults.mtbf_s(num_nodes) > math.log(HOPELESS):
        return RunOutcome(math.inf, 0.0, 0.0, math.inf, 0.0, 0)
    failures = [(float(when), node) for node, when in enumerate(rng.exponential(faults.node_mtbf_s, num_nodes))]
    heapq.heapify(failures)
    now = work_s = checkpoint_s = lost_s = restart_s = 0.0
    done = num_failures = 0
    while done < num_steps:
        size = min(steps_a_segment, num_steps - done)
        steps_s = sum_of(size)
        end = now + steps_s + faults.checkpoint_s
        if end <= failures[0][0]:
            now, done = end, done + size
            work_s += steps_s
            checkpoint_s += faults.checkpoint_s
            continue
        lost_s += failures[0][0] - now
        began = failures[0][0]
        up = began
        while failures[0][0] <= up:
            when, node = failures[0]
            up = when + faults.restart_s
            num_failures += 1
            heapq.heapreplace(failures, (when + float(rng.exponential(faults.node_mtbf_s)), node))
        restart_s += up - began
        now = up
    return RunOutcome(now, work_s, checkpoint_s, lost_s, restart_s, num_failures)
