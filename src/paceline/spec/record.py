"""`RunRecord`: what happened in one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from paceline.errors import JobError, PacelineError
from paceline.regular_files import read_json
from paceline.spec.codec import MAY_DIVERGE, NOT_NEGATIVE, JsonValue, at_least
from paceline.spec.evaluation import EvaluationRecord
from paceline.spec.job import Job
from paceline.spec.plan import Plan

RECORD_FILE = "record.json"
"""The file name of `RunRecord` in a run folder."""

_SUMMARY = (
    *("accuracy", "loss", "samples_per_s", "time_to_first_step_s", "wall_s"),
    *("steps", "samples_seen", "world_size", "weights_sha256"),
)


@dataclass(frozen=True)
class StepTime:
    """Where the median step's time went, in seconds of rank 0."""

    total_s: float = at_least(0, 0.0)
    data_s: float = at_least(0, 0.0)
    compute_s: float = at_least(0, 0.0)
    exposed_comm_s: float = at_least(0, 0.0)


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: mean training loss over its samples, then the evaluation if there was one."""

    epoch: int = field(metadata=NOT_NEGATIVE)
    train_loss: float = field(metadata=MAY_DIVERGE)
    lr: float = field(metadata=NOT_NEGATIVE)
    train_s: float = field(metadata=NOT_NEGATIVE)
    metrics: dict[str, float] = field(default_factory=dict, metadata=MAY_DIVERGE)
    noise_scale: float | None = field(default=None, metadata=MAY_DIVERGE)
    """The gradient noise scale at the end of the epoch, in samples; None if it was not measured."""
    values: dict[str, float] = field(default_factory=dict, metadata=MAY_DIVERGE)
    """The means over the epoch's samples of what the loss function returned besides the loss."""


@dataclass(frozen=True)
class RunRecord(JsonValue):
    """What happened: `accuracy` and `loss` are the last evaluation's (None where nothing was evaluated)."""

    job: Job
    plan: Plan
    steps: int = field(metadata=NOT_NEGATIVE)
    samples_seen: int = field(metadata=NOT_NEGATIVE)
    accuracy: float | None = field(metadata=MAY_DIVERGE)
    loss: float | None = field(metadata=MAY_DIVERGE)
    train_loss: float | None = field(metadata=MAY_DIVERGE)
    train_s: float = field(metadata=NOT_NEGATIVE)
    """Seconds of training steps, without start-up and evaluation."""
    wall_s: float = field(metadata=NOT_NEGATIVE)
    """Seconds from launch to the end of the last worker."""
    time_to_first_step_s: float = field(metadata=NOT_NEGATIVE)
    """Seconds from launch to the end of the first optimizer update."""
    samples_per_s: float = field(metadata=NOT_NEGATIVE)
    """Steady throughput over all workers: samples a step over the median step time, or over all training where workers
    synchronise every few steps only."""
    step_time: StepTime
    weights_sha256: str
    step_p10_s: float | None = field(default=None, metadata=NOT_NEGATIVE)
    step_p90_s: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """One step in ten was shorter than `step_p10_s`, one in ten longer than `step_p90_s`; None: not measured."""
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

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """The record in a file.

        Raises:
            PacelineError: there is none, or it is damaged; the message names the file.
        """
        try:
            return cls.from_mapping(read_json(path))
        except (FileNotFoundError, NotADirectoryError):
            raise PacelineError(
                f"There is no run record '{path.absolute()}': name folders of finished runs, which hold a "
                f"{RECORD_FILE}."
            ) from None
        except OSError as problem:
            raise PacelineError(f"The run record '{path}' cannot be read: {problem.strerror}.") from None
        except ValueError as problem:
            raise PacelineError(f"The run record '{path}' is damaged ({problem}); train that run again.") from None
        except JobError as problem:
            raise PacelineError(f"The run record '{path}' is damaged or of another version: {problem}") from None

    def _repr_html_(self) -> str:
        """The summary as a table, for notebooks."""

        def cell(value: Any) -> str:
            is_small = isinstance(value, float) and abs(value) < 1000
            return f"{value:.4g}" if is_small else f"{value:,.0f}" if isinstance(value, int | float) else str(value)

        rows = "".join(
            f"<tr><th>{name}</th><td>{escape(cell(value))}</td></tr>" for name, value in self.summary().items()
        )
        return f"<table>{rows}</table>"

    def summary(self) -> dict[str, Any]:
        """The stable one-line result of `paceline train --json`; null for what diverged, since JSON has no NaN."""
        values = {name: getattr(self, name) for name in _SUMMARY}
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
