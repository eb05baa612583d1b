"""Chooses what the planner takes for usual hardware (`paceline.plan.step_constants.USUAL`) from families of tables.

The score of a choice is the logarithm of the density that forecasts give to rows they have not seen: it rewards small
errors, and intervals that are as wide as the errors. A table counts once, a family of n tables as the square root of n
tables, for they are not independent. To the score belongs that hardware experience is worth something: medians are
drawn to the start by a normal prior of a factor of e, deviations by one of a factor of e^0.3.

A table is fitted once, with wide priors; other choices are judged by weighing these samples anew (importance sampling).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import t

from paceline.plan.calibrate import FREEDOM, fit, log_steps
from paceline.plan.step_constants import USUAL, Observation, Prior

Array = NDArray[np.float64]

_MEDIAN_FREEDOM, _DEVIATION_FREEDOM = 1.0, 0.3
_WIDER = 1.3
"""The samples' priors are wider than the start by this factor, so that others have samples too."""
_BOUND = 2.0
"""Choices that are further away have no samples."""


CHOSEN = (
    "host_s_per_sample",
    "joint_slowdown",
    "straggler_spread",
    "inside_beta_s_per_byte",
    "shared_beta_s_per_byte",
    "between_beta_s_per_byte",
    "several_nodes_s",
    "growth_slowdown",
)
"""The constants whose priors are chosen; what else is unknown matters less, or is known from hardware."""
START: Mapping[str, Prior] = {
    **USUAL,
    "host_s_per_sample": Prior(0.01, 2.0),
    "joint_slowdown": Prior(0.005, 1.6),
    "straggler_spread": Prior(0.01, 1.5),
    "inside_beta_s_per_byte": Prior(0.015, 1.5),
    "shared_beta_s_per_byte": Prior(0.00075, 2.3),
    "between_beta_s_per_byte": Prior(3.0, 1.2, times=("inside_beta_s_per_byte", "shared_beta_s_per_byte")),
    "several_nodes_s": Prior(0.02, 1.5),
    "growth_slowdown": Prior(0.05, 1.0),
}
"""Set by reasons of hardware."""


@dataclass(frozen=True)
class Evidence:
    """What a table says for any choice, from some of its rows about the others."""

    family: str
    table: str
    deviations: Array
    """[num_samples, num_chosen]: logarithms of the constants over the medians of their start."""
    log_densities: Array
    """[num_rows, num_samples]: of the rows to forecast, in log(seconds)."""


def evidence_of(family: str, table: str, known: Sequence[Observation], wanted: Sequence[Observation]) -> Evidence:
    wider = {**START, **{name: replace(START[name], deviation=_WIDER * START[name].deviation) for name in CHOSEN}}
    calibration = fit(known, wider)
    priors = calibration.priors
    logs = []
    for name in CHOSEN:
        value = getattr(calibration.constants, name)
        if priors[name].times:
            value = value / sum(getattr(calibration.constants, other) for other in priors[name].times)
        logs.append(np.log(value / priors[name].median))
    misses = log_steps(calibration, [row.placement for row in wanted]) - np.log([row.step_time_s for row in wanted])
    densities = t.logpdf(misses, FREEDOM, scale=calibration.unseen_errors)
    return Evidence(family, table, np.concatenate(logs, axis=1), densities.T)


_SCALES = np.array([START[name].deviation for name in CHOSEN])


def negative_score(evidence: Sequence[Evidence], choice: Array) -> tuple[float, Array]:
    """And its gradient.

    Args:
        choice: the logarithms of the factors of the medians, then of the deviations, over those of the start.
    """
    by, wider = np.split(choice, 2)
    scales = _SCALES * np.exp(wider)
    value = float(np.square(by / _MEDIAN_FREEDOM).sum() + np.square(wider / _DEVIATION_FREEDOM).sum()) / 2
    slope = np.concatenate([by / _MEDIAN_FREEDOM**2, wider / _DEVIATION_FREEDOM**2])
    for weight, one in zip(_weights(evidence), evidence, strict=True):
        places = (one.deviations - by) / scales
        log_ratios = (np.square(one.deviations / _SCALES / _WIDER) - np.square(places)).sum(axis=1) / 2
        shares, told = _shares(log_ratios[None]), _shares(log_ratios + one.log_densities)
        value -= weight * float(np.log((shares * np.exp(one.log_densities)).sum(axis=1)).mean())
        gains = (told - shares).mean(axis=0)
        slope -= weight * np.concatenate([(gains @ places) / scales, gains @ np.square(places)])
    return value, slope


def best_choice(evidence: Sequence[Evidence], near: Array | None = None) -> Array:
    """The choice with the best score."""
    start = np.zeros(2 * len(CHOSEN)) if near is None else near
    found = minimize(
        lambda choice: negative_score(evidence, choice),
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-_BOUND, _BOUND)] * len(start),
        options={"maxiter": 60, "ftol": 1e-6},
    )
    return np.asarray(found.x)


def priors_at(choice: Array) -> dict[str, Prior]:
    by, wider = np.split(np.exp(choice), 2)
    found = dict(START)
    for place, name in enumerate(CHOSEN):
        one = START[name]
        found[name] = replace(one, median=one.median * by[place], deviation=one.deviation * wider[place])
    return found


def _weights(evidence: Sequence[Evidence]) -> list[float]:
    num_cases = Counter(one.table for one in evidence)
    num_tables = Counter(family for family, _ in {(one.family, one.table) for one in evidence})
    return [1 / math.sqrt(num_tables[one.family]) / num_cases[one.table] for one in evidence]


def _shares(logs: Array) -> Array:
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
