"""Measured rows that the other rows contradict: mistakes of writing, another unit, a disturbed measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.calibrate import Calibration, fit, predict
from paceline.plan.step_constants import Observation
from paceline.plan.step_time import INTERVAL_SIGMAS

_SIGMAS, _FACTOR = 4.0, 1.1
"""A row contradicts the others if their forecast misses it by both."""
_IMPOSSIBLE_FACTOR = 5.0
"""Beyond this factor a row is left out, for what it says is of another job, unit or machine."""
_ALL_ROWS = 4
"""Up to so many rows each is tried; of more, those that a fit of all misses by most."""
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

    def sentence(self, name: str) -> str:
        says = (
            f"{name} contradicts the other rows: it says {self.measured_s:.4g} s where they make "
            f"{self.forecast_s:.4g} s likely"
        )
        if not self.is_left_out:
            return f"{says}; measure it again, or leave it out."
        looks = 300 < self.measured_s / self.forecast_s < 3000
        return f"{says}; it was left out{', for it looks like milliseconds' if looks else ''}."


def fit_without_mistakes(observations: Sequence[Observation]) -> tuple[Calibration, tuple[Contradiction, ...]]:
    """The fit of all rows but those that cannot be true beside the others, and the rows that contradict."""
    calibration = fit(observations)
    if len(observations) < 3:
        return calibration, ()
    found = _contradictions(observations, calibration)
    impossible = [one for one in found if one.is_left_out]
    if not impossible:
        return calibration, tuple(found)
    left_out: set[int] = set()
    kept = list(range(len(observations)))
    while impossible and len(kept) > max(2, 2 * len(observations) // 3):
        left_out.add(kept[impossible[0].row])
        kept = [row for row in range(len(observations)) if row not in left_out]
        calibration = fit([observations[row] for row in kept])
        rest = [] if len(kept) < 3 else _contradictions([observations[row] for row in kept], calibration)
        impossible = [one for one in rest if one.is_left_out]
    forecasts = predict(calibration, [observations[row].placement for row in sorted(left_out)])
    mistakes = [
        Contradiction(row, observations[row].step_time_s, forecast.total_s, is_left_out=True)
        for row, forecast in zip(sorted(left_out), forecasts, strict=True)
    ]
    return calibration, tuple(mistakes)


def _contradictions(observations: Sequence[Observation], calibration: Calibration) -> list[Contradiction]:
    """The rows that a fit of all others misses by far, the most surprising first."""
    forecasts = predict(calibration, [observation.placement for observation in observations])
    misses = [
        abs(math.log(observation.step_time_s / forecast.total_s))
        for observation, forecast in zip(observations, forecasts, strict=True)
    ]
    suspects = sorted(range(len(observations)), key=lambda row: -misses[row])
    if len(observations) > _ALL_ROWS:
        suspects = [row for row in suspects[:_SUSPECTS] if misses[row] > 2 * calibration.error]
    found = []
    for row in suspects:
        others = fit([*observations[:row], *observations[row + 1 :]])
        (forecast,) = predict(others, [observations[row].placement])
        miss = math.log(observations[row].step_time_s / forecast.total_s)
        end_s = forecast.high_s if miss > 0 else forecast.low_s
        sigma = abs(math.log(end_s / forecast.total_s)) / INTERVAL_SIGMAS
        if abs(miss) <= max(_SIGMAS * sigma, math.log(_FACTOR)) or (
            len(observations) == 3 and not _is_impossible(miss)
        ):
            continue
        one = Contradiction(row, observations[row].step_time_s, forecast.total_s, _is_impossible(miss))
        found.append((abs(miss) / max(sigma, 1e-9), one))
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def _is_impossible(miss: float) -> bool:
    return abs(miss) > math.log(_IMPOSSIBLE_FACTOR)
