"""What to measure next: the placements that make forecasts over the user's range surer by most for what they cost.

The samples of the calibration say how the logarithms of all forecasts vary together. Taking them as jointly normal, the
covariance of all forecasts after a further measurement is known before it is made (I-optimal design, greedily:
Atkinson, Donev and Tobias 2007, "Optimum Experimental Designs"). Placements are taken one by one, each the one that
lowers the mean variance over the range by most for a device-second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.plan.calibrate import fit, from_priors, log_steps, predict
from paceline.plan.step_constants import Observation, Placement
from paceline.plan.step_time import INTERVAL_SIGMAS

_LEAST_ERROR = 0.05
"""Steps of one placement vary by this part from day to day, however well the few rows at hand agree."""
_STEPS_TO_MEASURE, _START_S = 100, 60.0
"""A row is the median of so many steps, after workers have started."""
_COST_POWER = 0.5
"""A placement may cost four times as many device-seconds if it helps twice as much: the cheapest rows help least, and
whoever measures waits for a row, not only for its devices."""


@dataclass(frozen=True)
class Suggestion:
    """A placement to measure."""

    placement: Placement
    promised_error: float
    """Nine of ten forecasts over the range are off by less, once it and all before it are measured: as a part."""
    device_seconds: float
    """What measuring it costs."""


def suggest(
    observations: Sequence[Observation],
    candidates: Sequence[Placement],
    budget: int,
    *,
    max_nodes: int | None = None,
    max_devices: int | None = None,
) -> list[Suggestion]:
    """Up to `budget` of the candidates, in the order in which to measure them; the candidates are the user's range too.

    Where nothing is measured yet, the first is the smallest: it costs least, and all others are judged by it.

    Args:
        max_nodes, max_devices: what there is to measure on; larger candidates are only forecast.
    """
    if not candidates:
        return []
    candidates = list(dict.fromkeys(candidates))
    calibration = fit(observations) if observations else from_priors(candidates)
    covariance = np.atleast_2d(np.cov(log_steps(calibration, candidates).T))
    error = max(calibration.error, _LEAST_ERROR)
    step_s = np.array([forecast.total_s for forecast in predict(calibration, candidates)])
    num_devices = np.array([candidate.layout.num_workers for candidate in candidates])
    costs = num_devices * seconds_to_measure(step_s)
    num_nodes = np.array([candidate.layout.num_nodes for candidate in candidates])
    is_left = (num_nodes <= (max_nodes or np.inf)) & (num_devices <= (max_devices or np.inf))
    suggestions: list[Suggestion] = []
    first = [] if observations else _smallest(candidates)
    while len(suggestions) < budget and is_left.any():
        variances = covariance.diagonal()
        gains = np.square(covariance).mean(axis=0) / (error**2 + variances) / costs**_COST_POWER
        best = first.pop(0) if first else int(np.argmax(np.where(is_left, gains, -np.inf)))
        covariance = covariance - np.outer(covariance[best], covariance[best]) / (error**2 + variances[best])
        is_left[best] = False
        left = np.maximum(covariance.diagonal(), 0.0).mean() + calibration.unseen_error**2
        promised = math.expm1(INTERVAL_SIGMAS * math.sqrt(left))
        suggestions.append(Suggestion(candidates[best], promised, float(costs[best])))
    return suggestions


def seconds_to_measure(step_s: Any) -> Any:
    """Seconds that each device needs to measure a row of such steps."""
    return _START_S + _STEPS_TO_MEASURE * step_s


def _smallest(candidates: Sequence[Placement]) -> list[int]:
    """The fewest workers at their middle micro-batch."""
    fewest = min(candidate.layout.num_workers for candidate in candidates)
    smallest = [place for place, candidate in enumerate(candidates) if candidate.layout.num_workers == fewest]
    smallest.sort(key=lambda place: candidates[place].micro_batch_size)
    return [smallest[len(smallest) // 2]]
