"""Fits the step model to measured rows, and forecasts rows that were not measured.

A fit is not one set of constants but many, equally likely after what was measured; a forecast is the middle of the
steps that they make, its interval their spread and the error of a row. Errors are factors, not seconds: log(measured /
forecast) follows Student's t distribution, so that one bad row does not distort the fit. Draws are seeded: the same
rows have the same forecast.

From few rows the constants are drawn by importance sampling in steps of tempered likelihood (Del Moral, Doucet and
Jasra 2006, "Sequential Monte Carlo samplers", J. R. Stat. Soc. B 68), so that what two rows leave open stays open. Many
rows leave one narrow peak, which least squares finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.step_model import PRIORS, Array, Constants, Prior, StepModel, StepParts, seconds_of
from paceline.spec import StepRow
from paceline.spec.forecast import BoundBy

_ROW_ERROR, _ROW_ERROR_DEVIATION = 0.012, 0.6
"""The error of a row, as the scale of log(measured / forecast), and how well that is known before anything is seen."""
_UNSEEN_ERROR = 0.025
"""The model's error on rows that were not measured, however well it fits those that were: a few per cent, as on
published tables. It only widens intervals."""
FREEDOM = 4.0
"""Degrees of freedom of errors: one row in a hundred misses by more than five times their scale."""
_T_MEDIAN = 0.741
"""The median of the absolute value of a number that follows that distribution."""
_T_QUANTILES = (-1.96, -1.12, -0.72, -0.41, -0.13, 0.13, 0.41, 0.72, 1.12, 1.96)
"""Ten equally likely errors: the quantiles 0.05, 0.15, … 0.95 of that distribution, the ends drawn in to -1.96 so that
ten values have the spread of all."""
_FEW_ROWS, _MOST_DRAWN_ROWS = 4, 48
_EFFORT_FOR_FEW, _EFFORT_FOR_MORE = (2000, 10), (1000, 20)
"""Samples, and Metropolis steps after each rise of the likelihood. Few rows leave a wide target, which may have several
peaks; more rows a narrow one that is far from the priors."""
_WANTED_ACCEPTANCE = 0.25
"""The share of random-walk moves that should be accepted in many dimensions (Roberts, Gelman and Gilks 1997)."""
_SEED = 20260701


@dataclass(frozen=True)
class StepForecast:
    """The forecast time of one training step, and its components."""

    total_s: float
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
    errors: Array
    """[num_samples, 1]: the scale of log(measured / forecast)."""

    spread: float = 0.0
    """The usual spread of a measured step's times, as the standard deviation of logarithms."""

    @property
    def unseen_errors(self) -> Array:
        """[num_samples, 1]: the same of rows that were not measured."""
        return np.asarray(np.hypot(self.errors, math.hypot(_UNSEEN_ERROR, self.spread)))

    def parts(self, rows: Sequence[StepRow]) -> StepParts:
        """The steps of the rows, for each sample of the constants."""
        return self.model.steps(rows, self.constants)

    def typical(self) -> dict[str, float]:
        """The median of each constant."""
        return {name: float(np.median(values)) for name, values in self.constants.items()}


def fit(rows: Sequence[StepRow], usual: Mapping[str, Prior] = PRIORS, inside_bytes_per_s: float | None = None) -> Fit:
    """Samples of the constants that are consistent with measured rows, one at least.

    Args:
        usual: what constants are before anything is measured.
        inside_bytes_per_s: a datasheet's rate of the links inside a node, a bound; None: not known.

    Raises:
        JobError: a row has an algorithm without a cost formula.
    """
    target = _Target(StepModel.around(rows, usual, inside_bytes_per_s), rows)
    points = target.drawn() if len(rows) <= _MOST_DRAWN_ROWS else target.near_best()
    spread = float(np.median([row.spread for row in rows]))
    return Fit(target.model, target.model.constants_at(points), target.errors_at(points), spread)


def predict(found: Fit, rows: Sequence[StepRow]) -> list[StepForecast]:
    """A forecast for each row: the middle of the samples, and the 90 % interval of a measurement."""
    if not rows:
        return []
    parts = found.parts(rows)
    totals = _middle(parts.total_s)
    factors = np.exp(found.unseen_errors * np.array(_T_QUANTILES))  # [num_samples, 10]
    measurements = (parts.total_s[:, None, :] * factors[:, :, None]).reshape(-1, len(rows))
    lows, highs = np.quantile(measurements, (0.05, 0.95), axis=0)
    # The parts of a forecast are mean fractions of its samples, so that they add up.
    computing, waited, sending = (
        (np.minimum(seconds, limit) / parts.total_s).mean(axis=0) * totals
        for seconds, limit in (
            (parts.compute_s, parts.total_s),
            (parts.slowest_s, parts.total_s),
            (parts.communication_s, math.inf),
        )
    )
    forecasts = []
    for place, total in enumerate(map(float, totals)):
        compute_s, overhead_s = float(computing[place]), max(0.0, float(waited[place] - computing[place]))
        communication_s, exposed_s = float(sending[place]), total - compute_s - overhead_s
        sent_s = max(communication_s, exposed_s)
        bound_by: BoundBy = "communication" if sent_s > overhead_s else "overhead"
        forecasts.append(
            StepForecast(
                total_s=total,
                compute_s=compute_s,
                communication_s=communication_s,
                exposed_s=exposed_s,
                overhead_s=overhead_s,
                bound_by="compute" if compute_s >= max(sent_s, overhead_s) else bound_by,
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


class _Target:
    """What is drawn from: points of the priors, standard normal before anything is measured, given the rows.

    A point has a number for each constant, and a last one for the error of a row.
    """

    def __init__(self, model: StepModel, rows: Sequence[StepRow]) -> None:
        self.model, self.rows = model, rows
        self._num_dimensions = len(model.priors) + 1
        self._measured = np.log([seconds_of(row) for row in rows])
        self._timed_apart = [place for place, row in enumerate(rows) if row.sync_time_s is not None]
        computed = (seconds_of(row) - (row.sync_time_s or 0.0) for row in rows)
        self._computed = np.log([max(one, 0.01 * seconds_of(row)) for one, row in zip(computed, rows, strict=True)])

    def errors_at(self, points: Array) -> Array:
        """[num_points, 1]: the scale of errors."""
        return np.asarray(_ROW_ERROR * np.exp(_ROW_ERROR_DEVIATION * points[:, -1:]))

    def misses(self, points: Array) -> Array:
        """[num_points, num_errors]: log(forecast / measured) over its scale, of steps and of what was computed in the
        rows that told how long a worker waited for gradients."""
        parts = self.model.steps(self.rows, self.model.constants_at(points))
        apart = self._timed_apart
        of_compute = np.log(parts.compute_s[:, apart]) - self._computed[apart]
        return np.concatenate([np.log(parts.total_s) - self._measured, of_compute], axis=1) / self.errors_at(points)

    def log_likelihood(self, points: Array) -> Array:
        """[num_points], but for a constant."""
        densities = -(FREEDOM + 1) / 2 * np.log1p(np.square(self.misses(points)) / FREEDOM)
        return np.asarray((densities - np.log(self.errors_at(points))).sum(axis=1))

    def drawn(self) -> Array:
        """[num_samples, num_dimensions]: a population from the priors, led to the target while the likelihood rises
        from its 0th to its first power: weighed, drawn anew by the weights, and moved by Metropolis steps."""
        rng = np.random.default_rng(_SEED)
        num_samples, num_moves = _EFFORT_FOR_FEW if len(self.rows) <= _FEW_ROWS else _EFFORT_FOR_MORE
        points = rng.normal(size=(num_samples, self._num_dimensions))
        logs = self.log_likelihood(points)
        power = 0.0
        while power < 1.0:
            following = _next_power(logs, power)
            places = (np.arange(num_samples) + rng.random()) / num_samples
            chosen = np.searchsorted(np.cumsum(_weights(logs, following - power)), places)
            chosen = np.minimum(chosen, num_samples - 1)
            points, logs, power = points[chosen], logs[chosen], following
            shape = np.linalg.cholesky(np.cov(points.T) + 1e-6 * np.eye(self._num_dimensions))
            scale = 2.0 / math.sqrt(self._num_dimensions)
            for _ in range(num_moves):
                moved = points + scale * rng.normal(size=points.shape) @ shape.T
                moved_logs = self.log_likelihood(moved)
                gains = power * (moved_logs - logs) - (np.square(moved) - np.square(points)).sum(axis=1) / 2
                accepted = np.log(rng.random(num_samples)) < gains
                points[accepted], logs[accepted] = moved[accepted], moved_logs[accepted]
                scale *= math.exp((accepted.mean() - _WANTED_ACCEPTANCE) / 2)
        return points

    def near_best(self) -> Array:
        """[num_samples, num_dimensions]: samples of the normal distribution around the most probable constants
        (Laplace's approximation), all with the usual error of a row."""
        from scipy.optimize import least_squares  # takes its time to load

        best = np.zeros(self._num_dimensions)
        for _ in range(2):
            error = best[-1:]
            found = least_squares(
                lambda point: np.concatenate([point, self.misses(np.concatenate([point, error])[None])[0]]),  # noqa: B023 - called in this round
                best[:-1],
                loss=lambda squares: _losses(squares, self._num_dimensions - 1),
                xtol=1e-4,
                ftol=1e-5,
                max_nfev=60,
            )
            best = np.concatenate([found.x, error])
            usual = float(np.median(np.abs(self.misses(best[None])))) / _T_MEDIAN
            best[-1] += math.log(max(usual, 1e-3)) / _ROW_ERROR_DEVIATION
        shape = np.linalg.cholesky(np.linalg.inv(found.jac.T @ found.jac))
        draws = np.random.default_rng(_SEED).normal(size=(_EFFORT_FOR_MORE[0], len(found.x)))
        return np.concatenate([found.x + draws @ shape.T, np.full((len(draws), 1), best[-1])], axis=1)


def _losses(squares: Array, num_priors: int) -> Array:
    """Value and two derivatives of the loss of squares: z for the priors, (freedom + 1) log(1 + z / freedom) for the
    misses behind them."""
    told = np.zeros((3, len(squares)))
    told[0], told[1] = squares, 1.0
    far = FREEDOM + squares[num_priors:]
    told[0, num_priors:] = (FREEDOM + 1) * np.log(far / FREEDOM)
    told[1, num_priors:] = (FREEDOM + 1) / far
    told[2, num_priors:] = -(FREEDOM + 1) / far**2
    return told


def _weights(logs: Array, difference: float) -> Array:
    weights = np.exp(difference * (logs - logs.max()))
    return np.asarray(weights / weights.sum())


def _next_power(logs: Array, power: float) -> float:
    """The largest power at which the weights still are worth half of the samples."""

    def is_small(step: float) -> bool:
        return float(1 / np.square(_weights(logs, step)).sum()) >= len(logs) / 2

    lowest, highest = 0.0, 1.0 - power
    if is_small(highest):
        return 1.0
    for _ in range(40):
        middle = (lowest + highest) / 2
        lowest, highest = (middle, highest) if is_small(middle) else (lowest, middle)
    return power + max(lowest, 1e-9)
