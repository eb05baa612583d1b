"""What to measure next: the placements that make forecasts over the user's range surer by most.

To first order the logarithm of a forecast is linear in the logarithms of the constants, so their covariance C after a
further measurement, and with it the variance of all forecasts, is known before the measurement is made. Placements
are taken one by one, each the one that lowers the mean variance over the range by most (I-optimal design, greedily:
Atkinson, Donev and Tobias 2007, "Optimum Experimental Designs").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.calibrate import fit, sensitivities, uninformed
from paceline.plan.step_constants import Observation, Placement

_LEAST_ERROR = 0.05
"""Steps of one placement vary by this part from day to day, however well the few rows at hand agree."""


@dataclass(frozen=True)
class Suggestion:
    """A placement to measure."""

    placement: Placement
    expected_error: float
    """Mean relative standard deviation of forecasts over the range once it and all before it are measured."""


def suggest(observations: Sequence[Observation], candidates: Sequence[Placement], budget: int) -> list[Suggestion]:
    """Up to `budget` of the candidates, in the order in which to measure them; the candidates are the user's range too.

    Two nodes never stand for many: where clouds cap each flow, a pair of nodes is slower than any link of three. So as
    long as nothing on three nodes or more is measured or suggested, and the range has some, none on two is suggested.
    Where nothing is measured yet, the first is the smallest: it costs least, and all others are judged by it.
    """
    if not candidates:
        return []
    calibration = fit(observations) if observations else uninformed(candidates)
    slopes = sensitivities(calibration, candidates)
    covariance = calibration.covariance
    error = max(calibration.error, _LEAST_ERROR)
    range_moments = slopes.T @ slopes / len(slopes)
    num_nodes = np.array([candidate.layout.num_nodes for candidate in candidates])
    is_left = np.ones(len(candidates), bool)
    knows_many = any(observation.placement.layout.num_nodes > 2 for observation in observations)
    suggestions: list[Suggestion] = []
    first = [] if observations else _smallest(candidates)
    while len(suggestions) < budget and is_left.any():
        spread = slopes @ covariance
        variances = (spread * slopes).sum(axis=1)
        gains = ((spread @ range_moments) * spread).sum(axis=1) / (error**2 + variances)
        allowed = is_left.copy()
        if not knows_many and (num_nodes > 2).any():
            allowed &= num_nodes != 2
        best = first.pop(0) if first else int(np.argmax(np.where(allowed, gains, -np.inf)))
        covariance = covariance - np.outer(spread[best], spread[best]) / (error**2 + variances[best])
        is_left[best] = False
        knows_many = knows_many or bool(num_nodes[best] > 2)
        mean_variance = float(np.trace(range_moments @ covariance))
        suggestions.append(Suggestion(candidates[best], math.sqrt(max(mean_variance, 0.0))))
    return suggestions


def _smallest(candidates: Sequence[Placement]) -> list[int]:
    """The fewest workers at their middle micro-batch."""
    fewest = min(candidate.layout.num_workers for candidate in candidates)
    smallest = [place for place, candidate in enumerate(candidates) if candidate.layout.num_workers == fewest]
    smallest.sort(key=lambda place: candidates[place].micro_batch_size)
    return [smallest[len(smallest) // 2]]
