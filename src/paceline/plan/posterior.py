"""Samples of unknown quantities, given what was measured.

The unknown are independent standard normal numbers before anything is measured. A population of samples from there is
led to the posterior in steps of tempered likelihood, likelihood^t with t from 0 to 1: each step weighs the samples,
draws them anew by their weights and moves each by a few Metropolis steps (a sequential Monte Carlo sampler: Del Moral,
Doucet and Jasra 2006, "Sequential Monte Carlo samplers", J. R. Stat. Soc. B 68). Posteriors with several peaks, and
quantities that the measurements hardly touch, need no special care. Draws are seeded: the same rows, the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_WANTED_ACCEPTANCE = 0.25
"""The share of random-walk moves that should be accepted in many dimensions (Roberts, Gelman and Gilks 1997)."""
_SEED = 20260701


def posterior_samples(
    log_likelihood: Callable[[Array], Array], num_dimensions: int, num_samples: int, num_moves: int
) -> Array:
    """[num_samples, num_dimensions]: equally weighted samples.

    Args:
        log_likelihood: of samples [num, num_dimensions], as [num].
        num_moves: Metropolis steps after each change of the temperature.
    """
    rng = np.random.default_rng(_SEED)
    samples = rng.normal(size=(num_samples, num_dimensions))
    logs = log_likelihood(samples)
    temperature = 0.0
    while temperature < 1.0:
        following = _next_temperature(logs, temperature)
        chosen = _drawn_again(_weights(logs, following - temperature), rng)
        samples, logs, temperature = samples[chosen], logs[chosen], following
        shape = np.linalg.cholesky(np.cov(samples.T) + 1e-6 * np.eye(num_dimensions))
        scale = 2.0 / math.sqrt(num_dimensions)
        for _ in range(num_moves):
            moved = samples + scale * rng.normal(size=samples.shape) @ shape.T
            moved_logs = log_likelihood(moved)
            gains = temperature * (moved_logs - logs) - (np.square(moved) - np.square(samples)).sum(axis=1) / 2
            accepted = np.log(rng.random(num_samples)) < gains
            samples[accepted], logs[accepted] = moved[accepted], moved_logs[accepted]
            scale *= math.exp((accepted.mean() - _WANTED_ACCEPTANCE) / 2)
    return samples


def samples_near_best(errors: Callable[[Array], Array], start: Array, num_samples: int, freedom: float) -> Array:
    """[num_samples, num_dimensions]: samples of the normal distribution around the most probable point (Laplace).

    For so many measurements that the posterior has one narrow peak.

    Args:
        errors: of one point [num_dimensions], as [num_measurements], which follow Student's t distribution.
        start: a point near the most probable one.
        freedom: degrees of freedom of that distribution.
    """
    from scipy.optimize import least_squares  # takes its time to load

    def residuals(point: Array) -> Array:
        return np.concatenate([point, errors(point)])

    def loss(squares: Array) -> Array:
        """Value and two derivatives: (freedom + 1) log(1 + z / freedom) for the errors, z itself for the priors."""
        told = np.zeros((3, len(squares)))
        told[0], told[1] = squares, 1.0
        far = freedom + squares[len(start) :]
        told[0, len(start) :] = (freedom + 1) * np.log(far / freedom)
        told[1, len(start) :] = (freedom + 1) / far
        told[2, len(start) :] = -(freedom + 1) / far**2
        return told

    best = least_squares(residuals, start, loss=loss, xtol=1e-4, ftol=1e-5, max_nfev=60)
    shape = np.linalg.cholesky(np.linalg.inv(best.jac.T @ best.jac))
    return np.asarray(best.x + np.random.default_rng(_SEED).normal(size=(num_samples, len(start))) @ shape.T)


def _weights(logs: Array, difference: float) -> Array:
    weights = np.exp(difference * (logs - logs.max()))
    return np.asarray(weights / weights.sum())


def _next_temperature(logs: Array, temperature: float) -> float:
    """The largest at which the weights still are worth half of the samples."""

    def is_small(step: float) -> bool:
        return float(1 / np.square(_weights(logs, step)).sum()) >= len(logs) / 2

    lowest, highest = 0.0, 1.0 - temperature
    if is_small(highest):
        return 1.0
    for _ in range(40):
        middle = (lowest + highest) / 2
        lowest, highest = (middle, highest) if is_small(middle) else (lowest, middle)
    return temperature + max(lowest, 1e-9)


def _drawn_again(weights: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Each sample as often as its weight says, up to rounding (systematic resampling)."""
    places = (np.arange(len(weights)) + rng.random()) / len(weights)
    return np.minimum(np.searchsorted(np.cumsum(weights), places), len(weights) - 1)
