"""`RunRecord`: what happened in one run; `RunStatus`: what its workers were doing a moment ago."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.spec.codec import DivergingFloat, JsonValue, NonNegativeFloat, NonNegativeInt
from paceline.spec.job import Job, Mode
from paceline.spec.plan import Plan

RECORD_FILE = "record.json"
"""The file name of `RunRecord` in a run folder."""
STATUS_FILE = "workers.json"
"""The file name of `RunStatus` in a run folder."""

_SUMMARY = (
    *("accuracy", "loss", "samples_per_s", "time_to_first_step_s", "wall_s"),
    *("steps", "samples_seen", "world_size", "weights_sha256"),
)


@dataclass(frozen=True)
class StepTime:
    """Where the median step's time went, in seconds of rank 0."""

    total_s: NonNegativeFloat = 0.0
    data_s: NonNegativeFloat = 0.0
    compute_s: NonNegativeFloat = 0.0
    exposed_comm_s: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: mean training loss over its samples, then the evaluation if there was one."""

    epoch: NonNegativeInt
    train_loss: DivergingFloat
    lr: NonNegativeFloat
    train_s: NonNegativeFloat
    metrics: dict[str, DivergingFloat] = field(default_factory=dict)
    noise_scale: DivergingFloat | None = None
    """The gradient noise scale at the end of the epoch, in samples; None if it was not measured."""
    values: dict[str, DivergingFloat] = field(default_factory=dict)
    """The means over the epoch's samples of what the loss function returned besides the loss."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of a run."""

    step: NonNegativeInt
    """The number of steps before it."""
    epoch: NonNegativeInt
    metrics: dict[str, DivergingFloat]
    is_scheduled: bool = True
    """Whether `eval_every_steps` or `eval_every_epochs` asked for it; else it was made because the run ended."""


@dataclass(frozen=True)
class RunRecord(JsonValue):
    """What happened: `accuracy` and `loss` are the last evaluation's (None where nothing was evaluated)."""

    job: Job
    plan: Plan
    steps: NonNegativeInt
    samples_seen: NonNegativeInt
    accuracy: DivergingFloat | None
    loss: DivergingFloat | None
    train_loss: DivergingFloat | None
    train_s: NonNegativeFloat
    """Seconds of training steps, without start-up and evaluation."""
    wall_s: NonNegativeFloat
    """Seconds from launch to the end of the last worker."""
    time_to_first_step_s: NonNegativeFloat
    """Seconds from launch to the end of the first optimizer update."""
    samples_per_s: NonNegativeFloat
    """Steady throughput over all workers: samples a step over the median step time, or over all training where workers
    synchronise every few steps only."""
    step_time: StepTime
    weights_sha256: str
    epochs: tuple[EpochRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the result: scaled learning rate, warnings."""
    environment: dict[str, str] = field(default_factory=dict)
    evaluations: tuple[EvaluationRecord, ...] = ()
    """Every evaluation, in the order of its steps."""
    best: EvaluationRecord | None = None
    """The best evaluation by the metric of early stopping, or of `checkpoint.keep_best`; None: neither is set."""
    stopped: str | None = None
    """Why the run ended before its epochs were over; None: it did not, or `max_steps` ended it."""
    is_complete: bool = True
    """Whether the run is over; not if a limit of time ended it, and the same command goes on."""

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    def summary(self) -> dict[str, Any]:
        """The stable one-line result of `paceline train --json`; null for what diverged, since JSON has no NaN."""
        values = {name: getattr(self, name) for name in _SUMMARY}
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


@dataclass(frozen=True)
class WorkerStatus:
    """One worker."""

    rank: NonNegativeInt
    node: str
    """Its hostname."""
    pid: NonNegativeInt
    step: int | None
    """Optimizer updates done; None for a program without a `Run`."""
    doing: str
    """What it was doing, as a phrase."""
    memory_bytes: int | None = None
    """Memory of the process that lies in RAM."""


@dataclass(frozen=True)
class GpuUse:
    """What a process uses of the GPU that it computes on."""

    index: int
    memory_bytes: int | None
    """GPU memory of the process."""
    busy: float | None
    """The fraction of the last moments in which the GPU computed, for any process."""


@dataclass(frozen=True)
class RunStatus(JsonValue):
    """All workers, at one time."""

    time: NonNegativeFloat
    """Seconds since the epoch."""
    workers: tuple[WorkerStatus, ...]
    """The status of each worker, by rank."""


def best_place(values: Sequence[float], metric: str, mode: Mode, min_change: float = 0.0) -> int | None:
    """The place of the best of a metric's values, the first of equal ones; a later one must be better by more than
    `min_change`. None if none is finite."""
    is_smallest = mode == "min" or (mode == "auto" and any(word in metric for word in ("loss", "error", "perplexity")))
    sign = -1.0 if is_smallest else 1.0
    best: int | None = None
    for place, value in enumerate(values):
        if math.isfinite(value) and (best is None or sign * value > sign * values[best] + min_change):
            best = place
    return best
