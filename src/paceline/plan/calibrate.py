"""Fits the constants of the step model to measured steps, and forecasts steps that were not measured.

Every constant is positive and has a weak prior: what hardware usually has, times or divided by a factor of e^deviation.
The fit is the most probable set of constants (maximum a posteriori) under errors that are factors, not seconds: log
(forecast / measured) is normal near zero and has long tails, so that one bad row does not distort the fit. With one
device and two devices the priors decide what is not identifiable; each further row replaces some of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import JobError
from paceline.plan.model import StepForecast
from paceline.plan.step_constants import (
    CONSTANT_NAMES,
    TINY_STEP,
    UNKNOWN_GRADIENT_BYTES,
    Array,
    Constants,
    Observation,
    Placement,
    StepArrays,
    constants_of,
    logs_of,
    priors_of,
    slopes,
    usual_sizes,
)
from paceline.plan.step_time import INTERVAL_SIGMAS, bound_by

_PRIOR_ERROR, _PRIOR_ERROR_WEIGHT = 0.02, 3.0
"""Standard deviation of log(measured / forecast) before anything is seen, and as many rows as that is worth."""
_UNSEEN_ERROR = 0.04
"""The model error on placements that were not measured, however well the fit is on those that were: a few per cent,
as on published tables. It only widens intervals."""
_ROBUST_SIGMAS = 2.0
"""Errors larger than this many standard deviations count in proportion, not by their square."""
_FARTHEST = 3.5
"""Deviations of the prior within which a constant must stay."""
_OUTLIER_SIGMAS, _OUTLIER_FACTOR = 4.0, 1.1
"""A row is an outlier if the forecast from the others misses it by both."""


@dataclass(frozen=True)
class Outlier:
    """A row that the others contradict."""

    row: int
    """Counted from 0."""
    measured_s: float
    forecast_s: float
    """The forecast from all other rows."""

    def sentence(self, name: str) -> str:
        return (
            f"{name} contradicts the other rows: it says {self.measured_s:.4g} s where they make "
            f"{self.forecast_s:.4g} s likely; measure it again, or leave it out."
        )


@dataclass(frozen=True)
class Calibration:
    """Fitted constants and their uncertainty."""

    constants: Constants
    covariance: Array
    """Covariance of the logarithms of the constants, in their order."""
    axis_ends: Array
    """Logarithms of the constants at the ends of the 90 % interval along each principal axis of their uncertainty: rows
    2 k and 2 k + 1 are the two ends of axis k."""
    error: float
    """Standard deviation of log(measured / forecast) after the fit."""
    gradient_bytes: float
    """The gradient size of placements without one."""
    link_bytes_per_s: float | None
    """The datasheet rate that `between_beta_s_per_byte` belongs to, if the rows give it."""
    outliers: tuple[Outlier, ...] = ()

    def relative_deviation(self, name: str) -> float:
        """The uncertainty of a constant: a factor of e^this."""
        return math.sqrt(float(self.covariance.diagonal()[CONSTANT_NAMES.index(name)]))


def fit(observations: Sequence[Observation]) -> Calibration:
    """The most probable constants, by bounded non-linear least squares from several starts.

    Raises:
        JobError: no row, or one whose algorithm has no price.
    """
    calibration = _fit(observations)
    return replace(calibration, outliers=_outliers(observations, calibration))


def predict(calibration: Calibration, placements: Sequence[Placement]) -> list[StepForecast]:
    """A forecast for each placement, with an interval from the constants' uncertainty and the error they leave."""
    if not placements:
        return []
    steps = StepArrays.of(placements, calibration.gradient_bytes, calibration.link_bytes_per_s)
    constants = calibration.constants
    parts = steps.parts(constants, steps.communication_s(constants))
    falls, rises = _interval(calibration, steps, parts.total_s)
    return [
        StepForecast(
            total_s=float(total),
            compute_s=float(compute),
            communication_s=float(communication),
            exposed_s=float(total - slowest),
            loader_s=0.0,
            overhead_s=float(slowest - compute),
            bound_by=bound_by(compute, communication, 0.0, slowest - compute, total),
            low_s=float(total * fall),
            high_s=float(total * rise),
        )
        for compute, slowest, communication, total, fall, rise in zip(
            parts.compute_s, parts.slowest_s, parts.communication_s, parts.total_s, falls, rises, strict=True
        )
    ]


def _interval(calibration: Calibration, steps: StepArrays, total: Array) -> tuple[Array, Array]:
    """The factors to either end of the 90 % prediction interval of a measurement.

    Along each principal axis of the constants the slope tells what it does to the forecast, or its end where that is
    more: how slow a sum may be that hides behind computing shows in no slope. Axes are independent: squares add up.
    """
    logs = logs_of(calibration.constants)
    variances, directions = np.linalg.eigh(calibration.covariance)
    axes = INTERVAL_SIGMAS * np.sqrt(np.maximum(variances, 0.0)) * directions
    linear = np.abs(slopes(steps, logs, np.full(len(logs), TINY_STEP))[0] @ axes)
    falls = np.full(len(total), INTERVAL_SIGMAS**2 * (calibration.error**2 + _UNSEEN_ERROR**2))
    rises = falls.copy()
    for axis, slope in enumerate(linear.T):
        shifts = []
        for end in calibration.axis_ends[2 * axis : 2 * axis + 2]:
            constants = constants_of(end)
            there = steps.parts(constants, steps.communication_s(constants))
            shifts.append(np.log(there.total_s / total))
        rises += np.maximum(np.maximum(*shifts), slope) ** 2
        falls += np.minimum(np.minimum(*shifts), -slope) ** 2
    return np.exp(-np.sqrt(falls)), np.exp(np.sqrt(rises))


def _axis_ends(logs: Array, covariance: Array, misfit: Callable[[Array], float]) -> Array:
    """The ends of the principal axes, nearer where the rows do not bear as much as the covariance promises."""
    variances, directions = np.linalg.eigh(covariance)
    most = misfit(logs) + 2 * INTERVAL_SIGMAS**2  # a normal distribution would have half of this added
    axis_ends = []
    for axis in (INTERVAL_SIGMAS * np.sqrt(np.maximum(variances, 0.0)) * directions).T:
        for shift in (axis, -axis):
            while misfit(logs + shift) > most and np.abs(shift).max() > TINY_STEP:
                shift = shift / 2
            axis_ends.append(logs + shift)
    return np.array(axis_ends)


def sensitivities(calibration: Calibration, placements: Sequence[Placement]) -> Array:
    """d log(step) / d log(constant), a row for each placement, a column for each constant.

    The slope over as much as a constant may still move, a standard deviation to either side: at a point it is nothing
    where a sum happens to hide.
    """
    steps = StepArrays.of(placements, calibration.gradient_bytes, calibration.link_bytes_per_s)
    deviations = np.sqrt(calibration.covariance.diagonal())
    logs = logs_of(calibration.constants)
    higher, lower = slopes(steps, logs, deviations)[0], slopes(steps, logs, -deviations)[0]
    return (higher + lower) / 2


def uninformed(placements: Sequence[Placement], step_time_s: float = 0.1) -> Calibration:
    """The constants from the priors only, for a job whose largest micro-batch takes `step_time_s` on one device."""
    largest = max(placement.micro_batch_size for placement in placements)
    gradient_bytes, link = usual_sizes(placements)
    priors = priors_of(step_time_s, largest, gradient_bytes, link)
    medians = Constants(**{name: prior.median for name, prior in priors.items()})
    deviations = np.array([prior.deviation for prior in priors.values()])
    covariance = np.diag(deviations**2)
    return Calibration(
        constants=medians,
        covariance=covariance,
        axis_ends=_axis_ends(logs_of(medians), covariance, lambda logs: 0.0),  # noqa: ARG005 - no row to miss
        error=_PRIOR_ERROR,
        gradient_bytes=gradient_bytes or UNKNOWN_GRADIENT_BYTES,
        link_bytes_per_s=link,
    )


@dataclass(frozen=True)
class _Problem:
    """The rows and priors of a fit as arrays; unknown are the logarithms of the constants."""

    steps: StepArrays
    measured: Array
    """[num_rows]: logarithms of the measured steps."""
    compute_only: Array
    """[num_rows]: logarithms of what a worker computed; NaN where that was not measured."""
    medians: Array
    deviations: Array
    """[num_constants]: the priors of the logarithms."""

    @property
    def with_compute(self) -> NDArray[np.intp]:
        return np.flatnonzero(np.isfinite(self.compute_only))

    @property
    def num_measured(self) -> int:
        return len(self.measured) + len(self.with_compute)

    def misses(self, logs: Array) -> Array:
        """log(forecast / measured), of steps and then of computing by itself where that was measured."""
        constants = constants_of(logs)
        parts = self.steps.parts(constants, self.steps.communication_s(constants))
        of_compute = (np.log(parts.compute_s) - self.compute_only)[self.with_compute]
        return np.concatenate([np.log(parts.total_s) - self.measured, of_compute])

    def residuals(self, logs: Array, error: float) -> Array:
        return np.concatenate([self.misses(logs) / error, (logs - self.medians) / self.deviations])

    def jacobian(self, logs: Array, error: float) -> Array:
        of_total, of_compute = slopes(self.steps, logs, np.full(len(logs), TINY_STEP))
        return np.concatenate([of_total / error, of_compute[self.with_compute] / error, np.diag(1 / self.deviations)])

    def misfit(self, logs: Array, error: float) -> float:
        return float(_long_tailed(np.square(self.residuals(logs, error)), self.num_measured)[0].sum())

    def solve(self, start: Array, error: float) -> Any:
        from scipy.optimize import least_squares  # takes its time to load

        lowest, highest = self.medians - _FARTHEST * self.deviations, self.medians + _FARTHEST * self.deviations
        return least_squares(
            lambda logs: self.residuals(logs, error),
            np.clip(start, lowest, highest),
            jac=lambda logs: self.jacobian(logs, error),
            bounds=(lowest, highest),
            loss=lambda squares: _long_tailed(squares, self.num_measured),
            x_scale=self.deviations,
            ftol=1e-5,
            xtol=1e-5,
            max_nfev=60,
        )


def _fit(observations: Sequence[Observation], near: Calibration | None = None) -> Calibration:
    """The fit, from several starts, or from the constants of another fit of nearly the same rows."""
    if not observations:
        raise JobError("There is no measured row to fit; measure one device and two devices at least.")
    placements = [observation.placement for observation in observations]
    gradient_bytes, link = usual_sizes(placements)
    # The row that says most about computing alone: fewest workers, then the largest micro-batch.
    anchor = min(observations, key=lambda row: (row.placement.layout.num_workers, -row.placement.micro_batch_size))
    priors = priors_of(anchor.step_time_s, anchor.placement.micro_batch_size, gradient_bytes, link).values()
    problem = _Problem(
        steps=StepArrays.of(placements, gradient_bytes or UNKNOWN_GRADIENT_BYTES, link),
        measured=np.log([observation.step_time_s for observation in observations]),
        compute_only=np.log([_compute_only_s(observation) for observation in observations]),
        medians=np.log([prior.median for prior in priors]),
        deviations=np.array([prior.deviation for prior in priors]),
    )
    if near is None:
        # Whether gradients or computing take longer can look alike in few rows; a start on either side tells.
        between = np.arange(len(CONSTANT_NAMES)) == CONSTANT_NAMES.index("between_beta_s_per_byte")
        starts = [problem.medians + shift * problem.deviations * between for shift in (0.0, 1.5)]
        error, num_rounds = 0.05, 3
    else:
        starts, error, num_rounds = [logs_of(near.constants)], near.error, 1
    solution = min((problem.solve(start, error) for start in starts), key=lambda result: float(result.cost))
    for _ in range(num_rounds):
        misses = problem.misses(solution.x)[: len(observations)]
        error = _error_left(misses, error, solution.jac, len(CONSTANT_NAMES))
        solution = problem.solve(solution.x, error)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)
    return Calibration(
        constants=constants_of(solution.x),
        covariance=covariance,
        axis_ends=_axis_ends(solution.x, covariance, lambda logs: problem.misfit(logs, error)),
        error=error,
        gradient_bytes=gradient_bytes or UNKNOWN_GRADIENT_BYTES,
        link_bytes_per_s=link,
    )


def _compute_only_s(observation: Observation) -> float:
    """Compute time of a worker if its waiting time was measured; else NaN."""
    if observation.sync_time_s is None:
        return math.nan
    return max(observation.step_time_s - observation.sync_time_s, 0.01 * observation.step_time_s)


def _long_tailed(squares: Array, num_measured: int) -> Array:
    """Value and two derivatives of 2 c^2 (sqrt(1 + z / c^2) - 1) for the errors, of z itself for the priors."""
    robust = np.zeros((3, len(squares)))
    robust[0], robust[1] = squares, 1.0
    inner = 1 + squares[:num_measured] / _ROBUST_SIGMAS**2
    robust[0, :num_measured] = 2 * _ROBUST_SIGMAS**2 * (np.sqrt(inner) - 1)
    robust[1, :num_measured] = inner**-0.5
    robust[2, :num_measured] = -0.5 / _ROBUST_SIGMAS**2 * inner**-1.5
    return robust


def _error_left(misses: Array, error: float, jacobian: Array, num_constants: int) -> float:
    """The standard deviation that the rows and its prior make likely; constants that the rows decide use up rows."""
    of_rows = jacobian[: len(misses)]
    num_decided = float(np.trace(np.linalg.solve(jacobian.T @ jacobian, of_rows.T @ of_rows)))
    squares = _long_tailed(np.square(misses / error), len(misses))[0] * error**2
    freedom = max(len(misses) - min(num_decided, num_constants), 0.0)
    return math.sqrt((_PRIOR_ERROR_WEIGHT * _PRIOR_ERROR**2 + squares.sum()) / (_PRIOR_ERROR_WEIGHT + freedom))


def _outliers(observations: Sequence[Observation], calibration: Calibration) -> tuple[Outlier, ...]:
    """Rows that a fit of all others misses by far; only those are tried that the common fit has trouble with."""
    if len(observations) < 4:
        return ()
    forecasts = predict(calibration, [observation.placement for observation in observations])
    misses = [
        abs(math.log(observation.step_time_s / forecast.total_s))
        for observation, forecast in zip(observations, forecasts, strict=True)
    ]
    suspects = sorted(range(len(observations)), key=lambda row: -misses[row])[:3]
    found = []
    for row in suspects:
        if misses[row] < 2 * calibration.error and len(observations) > 12:
            continue
        others = _fit([*observations[:row], *observations[row + 1 :]], near=calibration)
        (forecast,) = predict(others, [observations[row].placement])
        miss = math.log(observations[row].step_time_s / forecast.total_s)
        end_s = forecast.high_s if miss > 0 else forecast.low_s
        sigma = abs(math.log(end_s / forecast.total_s)) / INTERVAL_SIGMAS
        if abs(miss) > max(_OUTLIER_SIGMAS * sigma, math.log(_OUTLIER_FACTOR)):
            found.append(Outlier(row, observations[row].step_time_s, forecast.total_s))
    return tuple(found)
