"""Fits the step model to measured rows, and forecasts rows that were not measured.

A fit is not one set of constants but many, equally likely after what was measured; a forecast is the middle of the
steps that they make, its interval their spread and the error of a row. Errors are factors, not seconds: log(measured /
forecast) follows Student's t distribution, so that one bad row does not distort the fit. Draws are seeded: the same
rows have the same forecast.

From few rows the constants are drawn from their priors and weighed by the likelihood (importance sampling), so that
what two rows leave open stays open. More rows leave one narrow peak, which least squares finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.step_model import Array, Constants, StepModel, seconds_of
from paceline.spec import StepRow
from paceline.spec.forecast import BoundBy

_ROW_ERROR = 0.012
"""The usual error of a row, as the scale of log(measured / forecast)."""
_ERROR_ROWS = 4.0
"""That is known as well as if it had been seen in so many rows."""
_UNSEEN_ERROR = 0.025
"""The model's error on rows that were not measured, however well it fits those that were: a few per cent, as on
published tables. It only widens intervals."""
_FREEDOM = 4.0
"""Degrees of freedom of errors: one row in a hundred misses by more than five times their scale."""
_T_QUANTILES = (-1.96, -1.12, -0.72, -0.41, -0.13, 0.13, 0.41, 0.72, 1.12, 1.96)
"""Ten equally likely errors: the quantiles 0.05, 0.15, … 0.95 of that distribution, the ends drawn in to -1.96 so that
ten values have the spread of all."""
_FEW_ROWS = 3
_NUM_STEPS = 30
_NUM_MOVES = 10
_NUM_DRAWS, _NUM_SAMPLES = 20_000, 2000
_SEED = 20260701


@dataclass(frozen=True)
class StepForecast:
    """The forecast time of one training step, and its components."""

    step_s: float
    compute_s: float
    communication_s: float
    """Time of all communication, hidden or not."""
    exposed_s: float
    """Time of exposed communication, which compute does not hide, and what several nodes cost."""
    overhead_s: float
    """Waiting for the slowest worker and for the host, and the optimizer."""
    bound_by: BoundBy
    low_s: float
    high_s: float
    """The 90 % prediction interval of a measured step."""


@dataclass(frozen=True)
class Fit:
    """Samples of the constants, all equally likely after what was measured."""

    model: StepModel
    constants: Constants
    """Arrays [num_samples, 1]."""
    error: float
    """The scale of log(measured / forecast) of a row."""

    def typical(self) -> dict[str, float]:
        """The median of each constant."""
        return {name: float(np.median(values)) for name, values in self.constants.items()}


def fit(rows: Sequence[StepRow], inside_bytes_per_s: float | None = None) -> Fit:
    """Samples of the constants that are consistent with measured rows, one at least.

    Args:
        inside_bytes_per_s: a datasheet's rate of the links inside a node, a bound; None: not known.

    Raises:
        JobError: a row has an algorithm without a cost formula.
    """
    target = _Target(StepModel.around(rows, inside_bytes_per_s), rows)
    points, error = target.drawn() if len(rows) <= _FEW_ROWS else target.near_best()
    spread = float(np.median([row.spread for row in rows]))  # of the times of a measured step
    return Fit(target.model, target.model.constants_at(points), math.hypot(error, spread))


class _Target:
    """What is drawn from: points of the priors, standard normal before anything is measured, given the rows."""

    def __init__(self, model: StepModel, rows: Sequence[StepRow]) -> None:
        self.model, self.rows = model, rows
        self._random = np.random.default_rng(_SEED)
        self._num_constants = len(model.priors)
        self._measured = np.log([seconds_of(row) for row in rows])
        self._timed_apart = [place for place, row in enumerate(rows) if row.sync_time_s is not None]
        computed = (seconds_of(row) - (row.sync_time_s or 0.0) for row in rows)
        self._computed = np.log([max(one, 0.01 * seconds_of(row)) for one, row in zip(computed, rows, strict=True)])

    def misses(self, points: Array) -> Array:
        """[num_points, num_errors]: log(forecast / measured), of steps and of what was computed in the rows that told
        how long a worker waited for gradients."""
        parts = self.model.steps(self.rows, self.model.constants_at(points))
        apart = self._timed_apart
        of_compute = np.log(parts.compute_s[:, apart]) - self._computed[apart]
        return np.concatenate([np.log(parts.total_s) - self._measured, of_compute], axis=1)

    def drawn(self) -> tuple[Array, float]:
        """[num_samples, num_constants] by importance sampling from the priors, and the error of a row.

        The time of a sample, which the priors leave open, is drawn last, so that the row with the fewest workers is
        met: else most draws would be far from all rows.
        """
        points = self._random.normal(size=(_NUM_DRAWS, self._num_constants))
        anchor, deviation = self.rows.index(self.model.anchor), self.model.priors["per_sample_s"].deviation
        wanted = _ROW_ERROR * self._random.standard_t(_FREEDOM, size=_NUM_DRAWS)
        for _ in range(6):
            step_s = self.model.steps([self.model.anchor], self.model.constants_at(points)).total_s[:, 0]
            points[:, 0] += (self._measured[anchor] + wanted - np.log(step_s)) / deviation
        likelihoods = self.likelihoods(points, _ROW_ERROR)
        likelihoods[:, anchor] = -np.square(points[:, 0]) / 2
        return _drawn_again(points, likelihoods.sum(axis=1)), _ROW_ERROR

    def likelihoods(self, points: Array, error: float) -> Array:
        """[num_points, num_errors], as logarithms."""
        return -(_FREEDOM + 1) / 2 * np.log1p(np.square(self.misses(points) / error) / _FREEDOM)

    def moved(self, points: Array, error: float) -> Array:
        """The points after Metropolis steps, so that those that were drawn several times differ. A step keeps the
        priors, whatever its length (Cotter et al. 2013, "MCMC methods for functions", preconditioned Crank-Nicolson).
        """
        logs = self.likelihoods(points, error).sum(axis=1)
        for _ in range(_NUM_MOVES):
            length = self._random.uniform(0.0, 0.5, size=(len(points), 1))
            moved = np.sqrt(1 - length**2) * points + length * self._random.normal(size=points.shape)
            moved_logs = self.likelihoods(moved, error).sum(axis=1)
            accepted = np.log(self._random.random(len(points))) < moved_logs - logs
            points[accepted], logs[accepted] = moved[accepted], moved_logs[accepted]
        return points

    def near_best(self) -> tuple[Array, float]:
        """[num_samples, num_constants] of the normal distribution around the most probable constants (Laplace's
        approximation), and the error of a row.

        Gauss and Newton's steps, in which rows that miss by more than others weigh less, as Student's t distribution
        has it (Lange, Little and Taylor 1989, "Robust statistical modeling using the t distribution").
        """
        best, error, small = np.zeros(self._num_constants), _ROW_ERROR, 1e-4
        for place in range(_NUM_STEPS):
            # At first all rows weigh the same: else one that needs another constant may be taken for a bad one.
            freedom = 1000.0 if place < _NUM_STEPS / 2 else _FREEDOM
            misses = self.misses(np.vstack([best, best + small * np.eye(self._num_constants)]))
            slopes, now = (misses[1:] - misses[0]).T / small, misses[0]
            weights = (freedom + 1) / (freedom + np.square(now / error))
            precision = slopes.T @ (slopes * weights[:, None]) / error**2 + np.eye(self._num_constants)
            gradient = slopes.T @ (now * weights) / error**2 + best
            best = best - np.clip(np.linalg.solve(precision, gradient), -1.0, 1.0)
            seen = float((weights * np.square(now)).sum())
            error = math.sqrt((_ERROR_ROWS * _ROW_ERROR**2 + seen) / (_ERROR_ROWS + len(now)))
        shape = np.linalg.cholesky(np.linalg.inv(precision))
        draws = self._random.normal(size=(_NUM_DRAWS, self._num_constants))
        points = best + draws @ shape.T
        logs = self.likelihoods(points, error).sum(axis=1) + (np.square(draws) - np.square(points)).sum(axis=1) / 2
        return self.moved(_drawn_again(points, logs), error), error


def _drawn_again(points: Array, logs: Array) -> Array:
    """[num_samples, num_constants]: of the points, as many as they weigh, whose logarithms are `logs`."""
    weights = np.cumsum(np.exp(logs - logs.max()))
    places = np.searchsorted(weights, (np.arange(_NUM_SAMPLES) + 0.5) / _NUM_SAMPLES * weights[-1])
    return np.asarray(points[places])


def predict(found: Fit, rows: Sequence[StepRow]) -> list[StepForecast]:
    """A forecast for each row: the middle of the samples, and the 90 % interval of a measurement."""
    if not rows:
        return []
    parts = found.model.steps(rows, found.constants)
    totals = _middle(parts.total_s)
    factors = np.exp(math.hypot(found.error, _UNSEEN_ERROR) * np.array(_T_QUANTILES))
    measurements = (parts.total_s[:, None, :] * factors[:, None]).reshape(-1, len(rows))
    lows, highs = np.quantile(measurements, (0.05, 0.95), axis=0)
    # The parts of a forecast are mean fractions of its samples, so that they add up.
    computing, waited, sending = (
        ((seconds / parts.total_s).mean(axis=0) * totals).tolist()
        for seconds in (
            np.minimum(parts.compute_s, parts.total_s),
            np.minimum(parts.slowest_s, parts.total_s),
            parts.communication_s,
        )
    )
    forecasts = []
    for place, total in enumerate(totals.tolist()):
        compute_s, communication_s = computing[place], sending[place]
        overhead_s = max(0.0, waited[place] - compute_s)
        exposed_s = total - compute_s - overhead_s
        waits: dict[BoundBy, float] = {
            "compute": compute_s,
            "overhead": overhead_s,
            "communication": max(communication_s, exposed_s),
        }
        forecasts.append(
            StepForecast(
                step_s=total,
                compute_s=compute_s,
                communication_s=communication_s,
                exposed_s=exposed_s,
                overhead_s=overhead_s,
                bound_by=max(waits, key=waits.__getitem__),
                low_s=min(float(lows[place]), total),
                high_s=max(float(highs[place]), total),
            )
        )
    return forecasts


def _middle(totals: Array) -> Array:
    """[num_rows]: the geometric mean of the middle half of the samples. If two explanations fit the rows, it lies
    between them, while the median jumps from one to the other.

    Samples are weighted by 1 / step time, because errors are relative to the measured time: if the shorter of two
    explanations is the true one, a forecast between them has the larger relative error.
    """
    totals = np.sort(totals, axis=0)
    weights = 1 / totals
    shares = (np.cumsum(weights, axis=0) - weights / 2) / weights.sum(axis=0)
    weights[np.abs(shares - 0.5) > 0.25] = 0.0
    return np.asarray(np.exp((weights * np.log(totals)).sum(axis=0) / weights.sum(axis=0)))
