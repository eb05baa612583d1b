"""Times one worker's steps: forward and backward passes as training makes them, and the update after them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.optim import Optimizer

from paceline.batch import Batch
from paceline.data.order import ShuffledOrder
from paceline.measure.stopwatch import Stopwatch, seconds_of
from paceline.parallel import Assignment, Engine, StepInput
from paceline.train.numerics import LossFn
from paceline.train.optim import clip
from paceline.train.run import Run
from paceline.train.step import shard_seed

_WARMUP_PASSES, _MIN_PASSES = 2, 3
_LONG_WARMUP_PASSES, _LONG_MIN_PASSES = 1, 2
"""For passes that take more than `_SIZE_S`."""
_MAX_PASSES = 50
_QUARTILES_SIGMAS = 1.349
"""Standard deviations between the quartiles of a normal quantity."""
_SIZE_S = 1.0
"""Passes of one size are repeated for so long: medians settle."""


@dataclass(frozen=True)
class Subject:
    """What is timed: a job's model and optimizer on this process's device, and its data."""

    run: Run
    train_set: Any
    loss_fn: LossFn
    optimizer: Optimizer
    shard_size: int = 1


@dataclass(frozen=True)
class StepTiming:
    """Median seconds of a pass, and of the update after it: clipping, the optimizer, freeing gradients."""

    micro_batch_size: int
    pass_s: float
    update_s: float
    spread: float = 0.0
    """Standard deviation of the logarithm of a pass's seconds, from the quartiles; 0 for fewer than three passes."""

    @property
    def seconds(self) -> float:
        return self.pass_s + self.update_s


def time_steps(subject: Subject, size: int, budget_s: float, *, with_updates: bool = False) -> StepTiming:
    """Median seconds of a forward and backward pass over `size` samples, and of the update after it if there is one."""
    step = step_of(subject, subject.run.engine, size, with_updates=with_updates)
    passes: list[float] = []
    updates: list[float] = []
    stopwatch = Stopwatch()
    while not is_enough(passes, stopwatch.spent_s, budget_s):
        pass_s, update_s = step()
        passes.append(pass_s)
        updates.append(update_s)
    first, _ = num_passes(min(passes))
    timed = passes[first:]
    return StepTiming(size, statistics.median(timed), statistics.median(updates[first:]), spread_of(timed))


def spread_of(times_s: Sequence[float]) -> float:
    """The standard deviation of log(seconds) that a normal quantity with these quartiles has; outliers do not count."""
    if len(times_s) < 3:
        return 0.0
    lower, _, upper = statistics.quantiles(times_s, n=4, method="inclusive")
    return math.log(upper / lower) / _QUARTILES_SIGMAS if lower > 0 else 0.0


def step_of(
    subject: Subject, engine: Engine, size: int, rank: int = 0, world_size: int = 1, *, with_updates: bool
) -> Callable[[], tuple[float, float]]:
    """A function that makes this worker's pass over `size` samples, and an update if asked; returns their seconds."""
    run, optimizer = subject.run, subject.optimizer
    num_shards = max(1, size // subject.shard_size)
    assignment = Assignment.of(size * world_size, num_shards * world_size, rank, world_size)
    ends = list(itertools.accumulate(assignment.sizes))
    samples = np.split(_first_samples(subject.train_set, size), ends[:-1])
    shards = run.reader.read(subject.train_set, 0, samples, train=True)
    step_input = StepInput(
        assignment=assignment,
        batch=Batch(tuple(shards), assignment.sizes),
        loss_of=run.precision.of(subject.loss_fn),
        shard_seed=lambda shard: shard_seed(run.job.seed, 0, shard),
        scale=lambda loss: loss,
    )

    def update() -> None:
        clip(run.job.optim, run.model.parameters(), engine.gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        pass_s = seconds_of(lambda: engine.step(step_input, lambda _loss: None), run.device)
        return pass_s, seconds_of(update, run.device) if with_updates else 0.0

    return step


def num_passes(pass_s: float) -> tuple[int, int]:
    """The number of passes that warm up, and of those that are timed at least."""
    if pass_s > _SIZE_S:
        return _LONG_WARMUP_PASSES, _LONG_MIN_PASSES
    return _WARMUP_PASSES, _MIN_PASSES


def is_enough(times: Sequence[float], spent_s: float, budget_s: float) -> bool:
    """Whether there are enough timed passes for a median, or the budget is spent."""
    if not times:
        return False
    num_warmup, num_timed = num_passes(min(times))
    counted = len(times) - num_warmup
    return counted >= num_timed and (counted >= _MAX_PASSES or spent_s > min(_SIZE_S, budget_s))


def _first_samples(train_set: Any, size: int) -> Any:
    """Indices of `size` samples; a set with fewer gives some twice."""
    return np.resize(ShuffledOrder(len(train_set), min(size, len(train_set)), 0, 0).batch(0), size)
