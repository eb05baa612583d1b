"""`RunRecord`: what happened in one run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from paceline.spec.codec import JsonValue
from paceline.spec.job import Job
from paceline.spec.plan import Plan


@dataclass(frozen=True)
class StepTime:
    """Where the median step's time went, in seconds of rank 0."""

    total_s: float = 0.0
    data_s: float = 0.0
    compute_s: float = 0.0
    exposed_comm_s: float = 0.0


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: mean training loss over its samples, then the evaluation if there was one."""

    epoch: int
    train_loss: float
    lr: float
    train_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    noise_scale: float | None = None
    """The gradient noise scale at the end of the epoch, in samples; None if it was not measured."""


@dataclass(frozen=True)
class RunRecord(JsonValue):
    """What happened: `accuracy` and `loss` are the last evaluation's (None where nothing was evaluated)."""

    job: Job
    plan: Plan
    steps: int
    samples_seen: int
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    train_s: float
    """Seconds of training steps, without start-up and evaluation."""
    wall_s: float
    """Seconds from launch to the end of the last worker."""
    time_to_first_step_s: float
    """Seconds from launch to the end of the first optimizer update."""
    samples_per_s: float
    """Steady throughput over all workers: samples a step over the median step time, or over all training where workers
    synchronise every few steps only."""
    step_time: StepTime
    weights_sha256: str
    epochs: tuple[EpochRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the result: scaled learning rate, warnings."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        return cls.from_mapping(json.loads(path.read_text(encoding="utf-8")))

    def _repr_html_(self) -> str:
        """The summary as a table, for notebooks."""
        rows = "".join(
            f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in self.summary().items()
        )
        return f"<table>{rows}</table>"

    def summary(self) -> dict[str, Any]:
        """The stable one-line result of `paceline train --json`; null for what diverged, since JSON has no NaN."""
        values = {
            "accuracy": self.accuracy,
            "loss": self.loss,
            "samples_per_s": self.samples_per_s,
            "time_to_first_step_s": self.time_to_first_step_s,
            "wall_s": self.wall_s,
            "steps": self.steps,
            "samples_seen": self.samples_seen,
            "world_size": self.world_size,
            "weights_sha256": self.weights_sha256,
        }
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
