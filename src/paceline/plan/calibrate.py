"""Fits the constants of the step model to measured steps, and forecasts steps that were not measured.

Every constant is positive and has a prior: what hardware usually has, times or divided by a factor of e^deviation. The
fit is not one set of constants but many, samples of all that the rows leave possible (`posterior`), and a forecast is
the middle of what they make, its interval their spread and the error of a row. Errors are factors, not seconds:
log(measured / forecast) follows Student's t distribution, so that one bad row does not distort the fit. With one device
and two devices the priors decide what is not identifiable; each further row replaces some of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.model import StepForecast
from paceline.plan.posterior import posterior_samples, samples_near_best
from paceline.plan.step_constants import (
    CONSTANT_NAMES,
    UNKNOWN_GRADIENT_BYTES,
    USUAL,
    Array,
    Constants,
    Observation,
    Placement,
    Prior,
    StepArrays,
    StepParts,
    priors_of,
    usual_sizes,
)
from paceline.plan.step_time import bound_by

_ROW_ERROR, _ROW_ERROR_DEVIATION = 0.012, 0.6
"""The error of a row, as the scale of log(measured / forecast), and how well that is known before anything is seen."""
_UNSEEN_ERROR = 0.025
"""The model error on placements that were not measured, however well the fit is on those that were: a few per cent,
as on published tables. It only widens intervals."""
FREEDOM = 4.0
"""Degrees of freedom of errors: one row in a hundred misses by more than five times their scale."""
_T_MEDIAN = 0.741
"""The median of the absolute value of a number that follows that distribution."""
_T_QUANTILES = (-1.96, -1.12, -0.72, -0.41, -0.13, 0.13, 0.41, 0.72, 1.12, 1.96)
"""Ten equally likely errors: the quantiles 0.05, 0.15, … 0.95 of that distribution, the ends drawn in to -1.96 so that
ten values have the spread of all."""
_FEW_ROWS = 4
_NUM_SAMPLES, _NUM_MOVES = 2000, 10
"""For a few rows, whose posterior is wide and may have several peaks."""
_NUM_SAMPLES_OF_MANY, _NUM_MOVES_OF_MANY = 400, 30
"""For more rows, whose posterior is narrow and far from the priors: fewer samples that move more."""
_MOST_ROWS = 48
"""From more rows so many are sampled, and the best constants for all of them are found from there."""


@dataclass(frozen=True)
class Calibration:
    """Samples of the constants, all equally likely after what was measured."""

    constants: Constants
    """Arrays [num_samples, 1]."""
    errors: Array
    """[num_samples, 1]: the scale of log(measured / forecast)."""
    priors: Mapping[str, Prior]
    """What the constants were taken to be before anything was measured."""
    gradient_bytes: float
    """The gradient size of placements without one."""
    link_bytes_per_s: float | None
    """The datasheet rate that `between_beta_s_per_byte` belongs to, if the rows give it."""

    @classmethod
    def at(
        cls, coordinates: Array, priors: Mapping[str, Prior], gradient_bytes: float, link: float | None
    ) -> Calibration:
        """The samples at points of the priors, [num_samples, num_constants + 1]; the last number is the error's."""
        return cls(Constants.at(priors, coordinates), _errors_at(coordinates), priors, gradient_bytes, link)

    @property
    def error(self) -> float:
        """The usual error of a row."""
        return float(np.median(self.errors))

    @property
    def unseen_errors(self) -> Array:
        """[num_samples, 1]: the same of rows that were not measured."""
        return np.asarray(np.hypot(self.errors, _UNSEEN_ERROR))

    def parts(self, placements: Sequence[Placement]) -> StepParts:
        """The forecast steps of the placements, for each sample of the constants."""
        return StepArrays.of(placements, self.gradient_bytes, self.link_bytes_per_s).parts(self.constants)

    def medians(self) -> dict[str, float]:
        """The median of each constant."""
        return {name: float(np.median(getattr(self.constants, name))) for name in CONSTANT_NAMES}

    def deviations(self) -> dict[str, float]:
        """The uncertainty of each constant: a factor of e^this, one standard deviation."""
        return {name: float(np.std(np.log(getattr(self.constants, name)))) for name in CONSTANT_NAMES}


def fit(observations: Sequence[Observation], usual: Mapping[str, Prior] = USUAL) -> Calibration:
    """Samples of the constants that are consistent with the measured rows.

    Raises:
        JobError: an observation uses an algorithm without a cost model.
    """
    gradient_bytes, link = usual_sizes([observation.placement for observation in observations])
    # Compute time dominates the observation with the fewest workers, and of these the fastest.
    anchor = min(observations, key=lambda row: (row.placement.layout.num_workers, row.step_time_s / row.num_samples))
    one = anchor.placement
    priors = priors_of(anchor.step_time_s, one.micro_batch_size, gradient_bytes, link, one.num_passes, usual)
    vector_bytes = gradient_bytes or UNKNOWN_GRADIENT_BYTES
    some = observations
    if len(observations) > _MOST_ROWS:
        places = np.random.default_rng(0).choice(len(observations), _MOST_ROWS, replace=False)
        some = [observations[place] for place in sorted(places)]
    effort = (_NUM_SAMPLES, _NUM_MOVES) if len(some) <= _FEW_ROWS else (_NUM_SAMPLES_OF_MANY, _NUM_MOVES_OF_MANY)
    rows = _Rows.of(some, priors, vector_bytes, link)
    coordinates = posterior_samples(rows.log_likelihood, len(priors) + 1, *effort)
    if len(observations) > _MOST_ROWS:
        all_rows = _Rows.of(observations, priors, vector_bytes, link)
        coordinates = all_rows.samples_near(coordinates.mean(axis=0))
    return Calibration.at(coordinates, priors, vector_bytes, link)


@dataclass(frozen=True)
class _Rows:
    """Measured rows as arrays, and their likelihood for given constants."""

    priors: dict[str, Prior]
    steps: StepArrays
    measured: Array
    """[num_rows]: logarithms of the measured steps."""
    compute_only: Array
    """[num_rows]: logarithms of what a worker computed; NaN where that was not measured."""

    @classmethod
    def of(
        cls, observations: Sequence[Observation], priors: dict[str, Prior], gradient_bytes: float, link: float | None
    ) -> _Rows:
        placements = [observation.placement for observation in observations]
        return cls(
            priors=priors,
            steps=StepArrays.of(placements, gradient_bytes, link),
            measured=np.log([observation.step_time_s for observation in observations]),
            compute_only=np.log([_compute_only_s(observation) for observation in observations]),
        )

    def errors(self, coordinates: Array) -> Array:
        """[num_points, num_errors]: log(forecast / measured) over its scale, of steps and of computing by itself."""
        parts = self.steps.parts(Constants.at(self.priors, coordinates))
        misses = np.log(parts.total_s) - self.measured
        with_compute = np.flatnonzero(np.isfinite(self.compute_only))
        of_compute = np.log(parts.compute_s[:, with_compute]) - self.compute_only[with_compute]
        return np.concatenate([misses, of_compute], axis=1) / _errors_at(coordinates)

    def log_likelihood(self, coordinates: Array) -> Array:
        """[num_points], but for a constant."""
        densities = -(FREEDOM + 1) / 2 * np.log1p(np.square(self.errors(coordinates)) / FREEDOM)
        return np.asarray((densities - np.log(_errors_at(coordinates))).sum(axis=1))

    def samples_near(self, start: Array) -> Array:
        """Samples around the most probable constants, found from `start`; all with the usual error of a row."""
        scale = start[-1:]
        for _ in range(2):
            found = samples_near_best(
                lambda point: self.errors(np.concatenate([point, scale])[None])[0],  # noqa: B023 - called in this round
                start[:-1],
                _NUM_SAMPLES_OF_MANY,
                FREEDOM,
            )
            start = np.concatenate([found.mean(axis=0), scale])
            usual = float(np.median(np.abs(self.errors(start[None])))) / _T_MEDIAN
            scale = scale + math.log(max(usual, 1e-3)) / _ROW_ERROR_DEVIATION
        return np.concatenate([found, np.broadcast_to(scale, (len(found), 1))], axis=1)


def predict(calibration: Calibration, placements: Sequence[Placement]) -> list[StepForecast]:
    """A forecast for each placement: the middle of the samples, and the 90 % interval of a measurement."""
    if not placements:
        return []
    parts = calibration.parts(placements)
    totals = _middle(parts.total_s)
    factors = np.exp(calibration.unseen_errors * np.array(_T_QUANTILES))  # [num_samples, 10]
    measurements = (parts.total_s[:, None, :] * factors[:, :, None]).reshape(-1, len(placements))
    lows, highs = np.quantile(measurements, (0.05, 0.95), axis=0)
    # The parts of a forecast are mean fractions of its samples, so that they add up.
    compute, communication = (
        (seconds / parts.total_s).mean(axis=0) * totals for seconds in (parts.compute_s, parts.communication_s)
    )
    slowest = (np.minimum(parts.slowest_s, parts.total_s) / parts.total_s).mean(axis=0) * totals
    return [
        StepForecast(
            total_s=float(total),
            compute_s=float(computing),
            communication_s=float(sending),
            exposed_s=float(total - slowest_part),
            overhead_s=float(max(slowest_part - computing, 0.0)),
            bound_by=bound_by(computing, sending, 0.0, max(slowest_part - computing, 0.0), total),
            low_s=float(min(low, total)),
            high_s=float(max(high, total)),
        )
        for computing, slowest_part, sending, total, low, high in zip(
            compute, slowest, communication, totals, lows, highs, strict=True
        )
    ]


def log_steps(calibration: Calibration, placements: Sequence[Placement]) -> Array:
    """[num_samples, num_placements]: logarithms of the step times by each sample of the constants."""
    return np.log(calibration.parts(placements).total_s)


def _middle(totals: Array) -> Array:
    """[num_steps]: the geometric mean of the middle half of the samples. If two explanations fit the rows, it lies
    between them, while the median jumps from one to the other.

    Samples are weighted by 1 / step time, because errors are relative to the measured time: if the shorter of two
    explanations is the true one, a forecast between them has the larger relative error.
    """
    totals = np.sort(totals, axis=0)
    weights = 1 / totals
    shares = (np.cumsum(weights, axis=0) - weights / 2) / weights.sum(axis=0)
    weights[np.abs(shares - 0.5) > 0.25] = 0.0
    return np.asarray(np.exp((weights * np.log(totals)).sum(axis=0) / weights.sum(axis=0)))


def _errors_at(coordinates: Array) -> Array:
    return np.asarray(_ROW_ERROR * np.exp(_ROW_ERROR_DEVIATION * coordinates[:, -1:]))


def _compute_only_s(observation: Observation) -> float:
    """Compute time of a worker if its waiting time was measured; else NaN."""
    if observation.sync_time_s is None:
        return math.nan
    return max(observation.step_time_s - observation.sync_time_s, 0.01 * observation.step_time_s)
