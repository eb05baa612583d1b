"""Measured rows that the other rows contradict: typing errors, wrong units, a disturbed measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.plan.calibrate import Calibration, fit, predict
from paceline.plan.step_constants import Observation
from paceline.plan.step_time import INTERVAL_SIGMAS

_SIGMAS, _FACTOR = 4.0, 1.1
"""A row contradicts the others if their forecast misses it by both."""
_IMPOSSIBLE_FACTOR = 5.0
"""Beyond this factor a row is left out, since it must be of another job, unit or machine."""
_ALL_ROWS = 4
"""Up to this many rows each is tried; of more, the `_SUSPECTS` with the largest error in a fit of all."""
_SUSPECTS = 3


@dataclass(frozen=True)
class Contradiction:
    """A row that the others contradict."""

    row: int
    """Counted from 0."""
    measured_s: float
    forecast_s: float
    """The forecast from all other rows."""
    is_left_out: bool
    is_one_of_two: bool = False
    """Whether there is only one other row, which may be the wrong one as well."""

    def sentence(self, name: str) -> str:
        if self.is_one_of_two:
            return (
                f"{name} and the other row contradict each other: it says {self.measured_s:.4g} s where the other one "
                f"makes {self.forecast_s:.4g} s likely; one of the two is wrong, so measure both again."
            )
        says = (
            f"{name} contradicts the other rows: it says {self.measured_s:.4g} s where they make "
            f"{self.forecast_s:.4g} s likely"
        )
        if not self.is_left_out:
            return f"{says}; measure it again, or leave it out."
        looks = 300 < self.measured_s / self.forecast_s < 3000
        return f"{says}; it was left out{', for it looks like milliseconds' if looks else ''}."


def fit_without_mistakes(observations: Sequence[Observation]) -> tuple[Calibration, tuple[Contradiction, ...]]:
    """The fit of all rows except impossible ones, and the rows that the others contradict.

    With only two rows neither is left out, since either may be wrong.
    """
    calibration = fit(observations)
    kept, left_out = list(range(len(observations))), list[int]()
    found = _contradictions(observations, calibration)
    while found and found[0].is_left_out and len(kept) > max(2, 2 * len(observations) // 3):
        left_out.append(kept.pop(found[0].row))
        rest = [observations[row] for row in kept]
        calibration = fit(rest)
        found = _contradictions(rest, calibration)
    if not left_out:
        is_one_of_two = len(observations) == 2
        return calibration, tuple(replace(one, is_left_out=False, is_one_of_two=is_one_of_two) for one in found)
    forecasts = predict(calibration, [observations[row].placement for row in left_out])
    mistakes = [
        Contradiction(row, observations[row].step_time_s, forecast.total_s, is_left_out=True)
        for row, forecast in zip(left_out, forecasts, strict=True)
    ]
    return calibration, tuple(sorted(mistakes, key=lambda one: one.row))


def _contradictions(observations: Sequence[Observation], calibration: Calibration) -> list[Contradiction]:
    """Rows far from the forecast of a fit of all others: impossible ones first, then by decreasing error."""
    if len(observations) < 2:
        return []
    forecasts = predict(calibration, [observation.placement for observation in observations])
    misses = [
        abs(math.log(observation.step_time_s / forecast.total_s))
        for observation, forecast in zip(observations, forecasts, strict=True)
    ]
    suspects = sorted(range(len(observations)), key=lambda row: -misses[row])
    if len(observations) > _ALL_ROWS:
        suspects = [row for row in suspects[:_SUSPECTS] if misses[row] > 2 * calibration.error]
    if len(observations) == 2:  # either contradicts the other
        suspects = [1]
    found = []
    for row in suspects:
        others = fit([*observations[:row], *observations[row + 1 :]])
        (forecast,) = predict(others, [observations[row].placement])
        miss = math.log(observations[row].step_time_s / forecast.total_s)
        end_s = forecast.high_s if miss > 0 else forecast.low_s
        sigma = abs(math.log(end_s / forecast.total_s)) / INTERVAL_SIGMAS
        if abs(miss) > max(_SIGMAS * sigma, math.log(_FACTOR)):
            # An impossible row biases the fit of the others. Without it they agree, and its error is the largest.
            distance = abs(miss) / (others.error if _is_impossible(miss) else max(sigma, 1e-9))
            one = Contradiction(row, observations[row].step_time_s, forecast.total_s, _is_impossible(miss))
            found.append((one.is_left_out, distance, one))
    found.sort(key=lambda entry: entry[:2], reverse=True)
    if len(observations) <= _ALL_ROWS:  # one mistake among few rows makes the others contradict what is left
        found = found[:1]
    return [one for _, _, one in found]


def _is_impossible(miss: float) -> bool:
    return abs(miss) > math.log(_IMPOSSIBLE_FACTOR)
