"""A pipeline schedule played with known times: how long it takes, how much its workers wait, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.parallel.pipeline.schedules import Action, Schedule, needs


@dataclass(frozen=True)
class Simulation:
    """The time, waiting and memory of a schedule."""

    makespan_s: float
    bubble: float
    """The fraction of all workers' time in which they wait."""
    most_kept: tuple[int, ...]
    """Maximum number of micro-batches whose activations a worker keeps at once, over all its stages."""


def simulate(schedule: Schedule, seconds: Callable[[Action], float], hop_s: float = 0.0) -> Simulation:
    """Simulate a schedule with known times.

    Args:
        seconds: how long an action takes.
        hop_s: how long a message takes from worker to worker; the sender does not wait.

    Raises:
        ValueError: the schedule deadlocks.
    """
    num_workers = len(schedule)
    num_stages = 1 + max((action.stage for actions in schedule for action in actions), default=-1)
    ends: dict[Action, float] = {}
    clock = [0.0] * num_workers
    next_up = [0] * num_workers
    num_left = sum(map(len, schedule))
    while num_left:
        num_before = num_left
        for worker, actions in enumerate(schedule):
            while next_up[worker] < len(actions):
                action = actions[next_up[worker]]
                needed = needs(action, num_stages)
                if any(before not in ends for before in needed):
                    break
                hops = [ends[before] + hop_s * (before.stage != action.stage and num_workers > 1) for before in needed]
                clock[worker] = ends[action] = max([clock[worker], *hops]) + seconds(action)
                next_up[worker] += 1
                num_left -= 1
        if num_left == num_before:
            raise ValueError("this schedule deadlocks: its workers wait for each other")
    makespan_s = max(clock, default=0.0)
    busy_s = sum(seconds(action) for actions in schedule for action in actions)
    bubble = 1 - busy_s / (num_workers * makespan_s) if makespan_s else 0.0
    return Simulation(makespan_s, bubble, tuple(map(_most_kept, schedule)))


def _most_kept(actions: tuple[Action, ...]) -> int:
    kept = most = 0
    for action in actions:
        kept += {"forward": 1, "input": 0}.get(action.kind, -1)
        most = max(most, kept)
    return most
