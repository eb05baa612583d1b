"""Timings of all workers of a plan at the same time: a pass and an update, and what summing gradients adds to them.

Prices of algorithms come from links that were timed while nothing else went on. In a step they run beside passes, on
cores, memory and wires that the others use too; only a step shows what that makes of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from paceline.comm import ALGORITHMS, Links
from paceline.measure.load import LoadMeter
from paceline.measure.steps import Subject, step_of
from paceline.measure.stopwatch import Stopwatch, seconds_of
from paceline.measure.timing import largest
from paceline.parallel.engine import Engine
from paceline.parallel.layout import Whole
from paceline.parallel.parallelize import set_up_aggregation
from paceline.parallel.running_sum import RunningSum
from paceline.spec import AlgorithmName, Job, MachineLoad, Plan, SumTiming
from paceline.spec.codec import JsonValue, at_least
from paceline.train.process_group import World

_MOST_ROUNDS = 40
_NUM_WARMUP_STEPS = 2
"""Steps that are not counted: in the first ones connections are made and buckets are laid out."""

Steps = Mapping[AlgorithmName | None, Callable[[], object]]
"""What makes a step, by the algorithm that sums gradients in it; None: gradients are not summed."""


@dataclass(frozen=True)
class Together(JsonValue):
    """What all workers are asked to time at once; a micro-batch of 0 samples: nothing, they may end."""

    micro_batch_size: int = at_least(0, 0)
    budget_s: float = at_least(0, 0.0)


@dataclass(frozen=True)
class TogetherTiming:
    """What a step took with all workers at work."""

    step_s: float
    """A pass and an update on the slowest worker, without sums."""
    sums: tuple[SumTiming, ...]
    load: MachineLoad | None = None
    """What else the processors did meanwhile; on rank 0 only."""


def time_together(subject: Subject, world: World, job: Job, plan: Plan, wanted: Together) -> TogetherTiming:
    """Median seconds of a step without sums, and what the sums of training add to it; a collective of all workers.

    Algorithms take turns, because what else a machine does changes from minute to minute. A turn that does not fit into
    the budget is left out; the first of each is always taken.
    """
    with _steps(subject, world, job, plan, wanted.micro_batch_size) as steps:
        meter = LoadMeter(world.device)
        periods = _take_turns(steps, world, wanted.budget_s)
        load = meter.load(world.group)
    without_s = _typical(periods[None])
    sums = tuple(
        SumTiming(name, job.aggregation.wire, max(0.0, _typical(times) - without_s))
        for name, times in periods.items()
        if name is not None
    )
    return TogetherTiming(without_s, sums, load)


class _Switch:
    """An algorithm that stands for another one from step to step, or for none."""

    def __init__(self) -> None:
        self.name: AlgorithmName | None = None

    def __call__(self, values: Tensor, links: Links) -> None:
        if self.name is not None:
            ALGORITHMS[self.name](values, links)


@contextmanager
def _steps(subject: Subject, world: World, job: Job, plan: Plan, size: int) -> Iterator[Steps]:
    """A step without sums, and one with the algorithm that training would use."""
    sums_every_step = job.parity == "numeric" and job.aggregation.method == "every_step"
    if world.group is None or not sums_every_step:
        yield {None: step_of(subject, subject.run.engine, size, with_updates=True)}
        return
    model = subject.run.model
    aggregation = set_up_aggregation(job, replace(plan, algorithm="auto"), world.group, world.device)
    assert aggregation.aggregator is not None and aggregation.algorithm is not None
    switch = _Switch()
    aggregator = replace(aggregation.aggregator, algorithm=switch)
    try:
        layout = Whole(model, world.device, world.group)
        engine = Engine(layout, RunningSum(layout, aggregator))
        step = step_of(subject, engine, size, world.rank, world.world_size, with_updates=True)

        def step_with(name: AlgorithmName | None) -> object:
            switch.name = name
            return step()

        yield {name: partial(step_with, name) for name in (None, aggregation.algorithm)}
    finally:
        aggregator.scheduler.close()


def _take_turns(steps: Steps, world: World, budget_s: float) -> dict[AlgorithmName | None, list[float]]:
    """Seconds of every step, each from one rendezvous of all workers to the next, by rank 0's clock and budget."""
    periods: dict[AlgorithmName | None, list[float]] = {name: [] for name in steps}
    stopwatch = Stopwatch(budget_s)
    for _ in range(_NUM_WARMUP_STEPS):
        steps[None]()
    for _ in range(_MOST_ROUNDS):
        for name, step in steps.items():
            if _all_agree(world, not periods[name] or periods[name][-1] < stopwatch.left_s):
                periods[name].append(seconds_of(partial(_finish_together, step, world)))
    return periods


def _finish_together(step: Callable[[], object], world: World) -> None:
    step()
    _all_agree(world, True)


def _all_agree(world: World, wanted: bool) -> bool:
    """What rank 0 wants, for all workers; a collective."""
    return largest(float(wanted and world.rank == 0), world.group) > 0


def _typical(times: list[float]) -> float:
    """The median; the first time, in which connections were made, counts only where it is the only one."""
    return statistics.median(times[1:] or times)
