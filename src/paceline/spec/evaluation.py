"""The best of a run's evaluations, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.spec.codec import MAY_DIVERGE, NOT_NEGATIVE, at_least

Mode = Literal["auto", "min", "max"]
"""Whether smaller or larger values of a metric are better; "auto": smaller ones of a loss or an error."""


@dataclass(frozen=True)
class EarlyStoppingSpec:
    """When a run ends because its evaluations do not get better any more."""

    metric: str | None = None
    """The metric of evaluations that has to get better, "accuracy" or "loss", or the run ends; None: it never does."""
    patience: int = at_least(1, 5)
    """How many evaluations in a row may be no better before the run ends."""
    min_change: float = at_least(0, 0.0)
    """The least improvement over the best value before that counts."""
    mode: Mode = "auto"
    """Whether smaller ("min") or larger values ("max") are better; "auto": smaller ones where the metric's name says
    loss, error or perplexity."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of a run."""

    step: int = field(metadata=NOT_NEGATIVE)
    """After how many steps."""
    epoch: int = field(metadata=NOT_NEGATIVE)
    metrics: dict[str, float] = field(metadata=MAY_DIVERGE)
    is_scheduled: bool = True
    """Whether `eval_every_steps` or `eval_every_epochs` asked for it; else it was made because the run ended."""


def smaller_is_better(metric: str, mode: Mode) -> bool:
    """Whether the best value of a metric is its smallest."""
    return mode == "min" or (mode == "auto" and any(word in metric for word in ("loss", "error", "perplexity")))


def best_place(values: Sequence[float], metric: str, mode: Mode, min_change: float = 0.0) -> int | None:
    """The place of the best of a metric's values; None if none is finite.

    The first of equal values; a later one must be better by more than `min_change`.
    """
    sign = -1.0 if smaller_is_better(metric, mode) else 1.0
    best: int | None = None
    for place, value in enumerate(values):
        if math.isfinite(value) and (best is None or sign * value > sign * values[best] + min_change):
            best = place
    return best
