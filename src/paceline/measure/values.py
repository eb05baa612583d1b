"""Request and result of the program that times steps, stored as JSON. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec import Job, Plan
from paceline.spec.codec import JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

REQUEST_FILE, STEPS_FILE = "request.json", "steps.json"
"""The request, and the first worker's result, in the given folder."""


@dataclass(frozen=True)
class StepsRequest(JsonValue):
    """The jobs whose steps are timed, one after the other, by the workers of a plan."""

    jobs: tuple[Job, ...]
    plan: Plan
    budget_s: PositiveFloat = 60.0
    """Seconds of steps, for all jobs together."""


@dataclass(frozen=True)
class TimedSteps:
    """The median step of a job, on the first worker."""

    step_time_s: PositiveFloat
    sync_time_s: NonNegativeFloat | None = None
    """How long it waited for gradients; None: not known."""
    loading_s: NonNegativeFloat | None = None
    """How long it waited for its samples; None: not known."""
    spread: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of the step's time."""
    peak_memory_bytes: NonNegativeInt | None = None
    """The most that tensors held of its GPU; None: it has none."""


@dataclass(frozen=True)
class StepsProbe(JsonValue):
    """What was timed, and facts about the job."""

    timed: tuple[TimedSteps, ...]
    """Of each of the request's jobs."""
    num_parameters: NonNegativeInt
    num_samples: PositiveInt | None = None
    """Samples of the training set; None: not known."""
