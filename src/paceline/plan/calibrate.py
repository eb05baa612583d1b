"""From measured steps to the constants of the step's model, and from those to steps that nobody has measured.

    step = overlapped(slowest(compute), sum of gradients)        see step_time and collectives

Every constant is positive and has a weak prior: what hardware usually has, times or divided by a factor of e^deviation.
The fit is the most probable set of constants (maximum a posteriori) under errors that are factors, not seconds: log
(forecast / measured) is normal near zero and has long tails, so that one bad row does not bend the rest. With one
device and two devices the priors decide what cannot be seen; each further row takes some of that from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import JobError
from paceline.plan.collectives import COSTS
from paceline.plan.model import Layout, LinkCost, Network, StepForecast
from paceline.plan.step_time import (
    INTERVAL_SIGMAS,
    bound_by,
    compute_s,
    expected_maximum,
    neighbours_factor,
    overlapped_s,
    slowest_s,
)
from paceline.spec import AlgorithmName

Array = NDArray[np.float64]

UNKNOWN_GRADIENT_BYTES = 100e6
"""Stands in where no row tells: the constants of the links are then right for this size, and forecasts for any."""

_PRIOR_ERROR, _PRIOR_ERROR_WEIGHT = 0.02, 3.0
"""Standard deviation of log(measured / forecast) before anything is seen, and as many rows as that is worth."""
_UNSEEN_ERROR = 0.04
"""What the formulas miss on placements that nobody measured, however well they fit those that somebody did: the order
of the errors on published tables, a few in a hundred. It widens intervals only."""
_ROBUST_SIGMAS = 2.0
"""Errors larger than this many standard deviations count in proportion, not by their square."""
_TINY_STEP = 1e-5
"""In the logarithm of a constant, for a slope."""
_FARTHEST = 3.5
"""Deviations of the prior within which a constant must stay."""
_OUTLIER_SIGMAS, _OUTLIER_FACTOR = 4.0, 1.1
"""A row is an outlier if the forecast from the others misses it by both."""


@dataclass(frozen=True)
class Placement:
    """A step that is to be measured or forecast."""

    layout: Layout
    micro_batch_size: int
    algorithm: AlgorithmName = "all_reduce"
    gradient_bytes: float | None = None
    """None: as in the other rows."""
    link_bytes_per_s: float | None = None
    """The datasheet's figure of a node's link to the others; None: as in the other rows."""


@dataclass(frozen=True)
class Observation:
    """A measured step."""

    placement: Placement
    step_time_s: float
    sync_time_s: float | None = None
    """The part of it that a worker waited for gradients; the rest is what an average worker computed."""


@dataclass(frozen=True)
class Constants:
    """What is fitted; all of it positive."""

    fixed_s: float
    """Seconds of a micro-batch, however small."""
    per_sample_s: float
    floor_s: float
    """Launching the kernels of a micro-batch."""
    inside_alpha_s: float
    """Latency of messages inside a node: the sum over the buckets in which a step's gradients travel."""
    inside_beta_s_per_byte: float
    between_alpha_s: float
    between_beta_s_per_byte: float
    """Seconds a byte takes between the nodes of three or more."""
    pair_slowdown: float
    """Two nodes alone have one path between them, whose flows a cloud caps: each byte takes 1 + this as long."""
    growth_slowdown: float
    """Each doubling of the nodes beyond two makes a byte take longer by this part: they share switches."""
    overlap_beyond_sum: float
    """The exponent of the overlap, less 1: 0 is none."""
    tail_fraction: float
    """The part of communication that nothing hides."""
    straggler_spread: float
    """Standard deviation over mean of one worker's computing time."""
    neighbour_slowdown: float
    """What workers of one node take from each other, as a part of their computing time."""

    def network(self, layout: Layout, link_ratio: float = 1.0) -> Network:
        """The links as this layout sees them.

        Args:
            link_ratio: how many times slower the link between nodes is than the one the constants are for.
        """
        nodes = layout.num_nodes
        slowdown = 1 + self.pair_slowdown if nodes == 2 else 1 + self.growth_slowdown * math.log2(max(nodes, 2) / 2)
        return Network(
            inside=LinkCost(self.inside_alpha_s, self.inside_beta_s_per_byte),
            between=LinkCost(self.between_alpha_s, self.between_beta_s_per_byte * slowdown * link_ratio),
        )


@dataclass(frozen=True)
class Prior:
    """What a constant is before anything is measured: most likely within a factor of e^deviation of the median."""

    median: float
    deviation: float


@dataclass(frozen=True)
class Outlier:
    """A row that the others do not explain."""

    row: int
    """Counted from 0."""
    measured_s: float
    forecast_s: float
    """From all other rows."""

    def sentence(self, name: str) -> str:
        return (
            f"{name} contradicts the other rows: it says {self.measured_s:.4g} s where they make "
            f"{self.forecast_s:.4g} s likely; measure it again, or leave it out."
        )


@dataclass(frozen=True)
class Calibration:
    """Fitted constants and how sure they are."""

    constants: Constants
    covariance: Array
    """Covariance of the logarithms of the constants, in their order."""
    axis_ends: Array
    """Logarithms of the constants at the ends of the 90 % interval along each principal axis of their uncertainty: rows
    2 k and 2 k + 1 are the two ends of axis k."""
    error: float
    """Standard deviation of log(measured / forecast) that the constants leave."""
    gradient_bytes: float
    """Gradient size of a placement that does not give its own."""
    link_bytes_per_s: float | None
    """What `between_beta_s_per_byte` is for, where the rows tell."""
    outliers: tuple[Outlier, ...] = ()

    def relative_deviation(self, name: str) -> float:
        """How uncertain a constant still is: a factor of e^this."""
        return math.sqrt(float(self.covariance.diagonal()[CONSTANT_NAMES.index(name)]))


CONSTANT_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Constants))
_OF_LINKS = frozenset(name for name in CONSTANT_NAMES if name.startswith(("inside", "between", "pair", "growth")))
"""The constants that decide what a sum costs; the others leave it as it is."""


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
    steps = _Steps.of(placements, calibration.gradient_bytes, calibration.link_bytes_per_s)
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


def _interval(calibration: Calibration, steps: _Steps, total: Array) -> tuple[Array, Array]:
    """The factors to either end of the 90 % prediction interval of a measurement.

    Along each principal axis of the constants the slope tells what it does to the forecast, or its end where that is
    more: how slow a sum may be that hides behind computing shows in no slope. Axes are independent: squares add up.
    """
    logs = _logs(calibration.constants)
    variances, directions = np.linalg.eigh(calibration.covariance)
    axes = INTERVAL_SIGMAS * np.sqrt(np.maximum(variances, 0.0)) * directions
    linear = np.abs(_slopes(steps, logs, np.full(len(logs), _TINY_STEP))[0] @ axes)
    falls = np.full(len(total), INTERVAL_SIGMAS**2 * (calibration.error**2 + _UNSEEN_ERROR**2))
    rises = falls.copy()
    for axis, slope in enumerate(linear.T):
        shifts = []
        for end in calibration.axis_ends[2 * axis : 2 * axis + 2]:
            constants = _constants(end)
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
            while misfit(logs + shift) > most and np.abs(shift).max() > _TINY_STEP:
                shift = shift / 2
            axis_ends.append(logs + shift)
    return np.array(axis_ends)


def sensitivities(calibration: Calibration, placements: Sequence[Placement]) -> Array:
    """d log(step) / d log(constant), a row for each placement, a column for each constant.

    The slope over as much as a constant may still move, a standard deviation to either side: at a point it is nothing
    where a sum happens to hide.
    """
    steps = _Steps.of(placements, calibration.gradient_bytes, calibration.link_bytes_per_s)
    deviations = np.sqrt(calibration.covariance.diagonal())
    logs = _logs(calibration.constants)
    higher, lower = _slopes(steps, logs, deviations)[0], _slopes(steps, logs, -deviations)[0]
    return (higher + lower) / 2


def uninformed(placements: Sequence[Placement], step_time_s: float = 0.1) -> Calibration:
    """What the priors alone say, for a job whose largest micro-batch takes `step_time_s` on one device."""
    largest = max(placement.micro_batch_size for placement in placements)
    gradient_bytes, link = _common(placements)
    priors = _priors(step_time_s, largest, gradient_bytes, link)
    medians = Constants(**{name: prior.median for name, prior in priors.items()})
    deviations = np.array([prior.deviation for prior in priors.values()])
    covariance = np.diag(deviations**2)
    return Calibration(
        constants=medians,
        covariance=covariance,
        axis_ends=_axis_ends(_logs(medians), covariance, lambda logs: 0.0),  # noqa: ARG005 - no row to miss
        error=_PRIOR_ERROR,
        gradient_bytes=gradient_bytes or UNKNOWN_GRADIENT_BYTES,
        link_bytes_per_s=link,
    )


def _priors(step_s: float, micro_batch_size: int, gradient_bytes: float | None, link: float | None) -> dict[str, Prior]:
    """What hardware usually has, around a single step that took `step_s`.

    Without the size of gradients, links are known only by how long they take compared to computing: between nodes a
    hundredth to four times as long, inside a node a hundredth to as long.
    """
    if gradient_bytes is None:
        inside = Prior(0.05 * step_s / UNKNOWN_GRADIENT_BYTES, 1.5)
        between = Prior(0.2 * step_s / UNKNOWN_GRADIENT_BYTES, 2.0)
    else:
        inside = Prior(1 / 10e9, 1.5)  # PCIe 3.0 x16; NVLink has ten times as much, shared memory of CPUs a tenth
        between = Prior(1 / 1.25e9, 1.5)  # 10 Gbit/s
    if link is not None:
        between = Prior(1 / link, 0.5)
    return {
        "fixed_s": Prior(0.15 * step_s, 1.5),
        "per_sample_s": Prior(0.85 * step_s / micro_batch_size, 1.5),
        "floor_s": Prior(0.1 * step_s, 1.0),
        "inside_alpha_s": Prior(1e-4, 1.5),  # ten buckets at 10 us
        "inside_beta_s_per_byte": inside,
        "between_alpha_s": Prior(5e-4, 1.5),  # ten buckets at 50 us
        "between_beta_s_per_byte": between,
        "pair_slowdown": Prior(0.3, 0.7),
        "growth_slowdown": Prior(0.05, 1.0),
        "overlap_beyond_sum": Prior(5.0, 0.5),
        "tail_fraction": Prior(0.03, 1.0),
        "straggler_spread": Prior(0.02, 1.5),
        "neighbour_slowdown": Prior(0.03, 1.5),
    }


@dataclass(frozen=True)
class _Parts:
    """Seconds of many steps: an array for each part of a step."""

    compute_s: Array
    slowest_s: Array
    communication_s: Array
    total_s: Array


@dataclass(frozen=True)
class _Steps:
    """Placements as arrays; what a sum costs is asked once for those that share everything it depends on."""

    micro_batch_sizes: Array
    num_on_fullest: Array
    expected_maxima: Array
    sums: tuple[tuple[Layout, AlgorithmName, float, float], ...]
    """Layout, algorithm, bytes, link ratio of each distinct sum."""
    sum_of: NDArray[np.intp]
    """Which of them each step has."""

    @classmethod
    def of(cls, placements: Sequence[Placement], gradient_bytes: float, link: float | None) -> _Steps:
        keys = [
            (
                placement.layout,
                placement.algorithm,
                placement.gradient_bytes or gradient_bytes,
                1.0 if link is None else link / (placement.link_bytes_per_s or link),
            )
            for placement in placements
        ]
        sums = tuple(dict.fromkeys(keys))
        place_of = {key: place for place, key in enumerate(sums)}
        for _, algorithm, _, _ in sums:
            if algorithm not in COSTS:
                raise JobError(f"The algorithm {algorithm} has no price; known are {', '.join(COSTS)}.")
        return cls(
            micro_batch_sizes=np.array([placement.micro_batch_size for placement in placements], float),
            num_on_fullest=np.array([max(placement.layout.workers_per_node) for placement in placements], float),
            expected_maxima=np.array([expected_maximum(placement.layout.num_workers) for placement in placements]),
            sums=sums,
            sum_of=np.array([place_of[key] for key in keys], dtype=np.intp),
        )

    def communication_s(self, constants: Constants) -> Array:
        sums = [
            COSTS[algorithm](size_bytes, layout, constants.network(layout, link_ratio), 1)
            for layout, algorithm, size_bytes, link_ratio in self.sums
        ]
        return np.array(sums)[self.sum_of]

    def parts(self, constants: Constants, communication: Array) -> _Parts:
        compute = compute_s(
            self.micro_batch_sizes, constants.fixed_s, constants.per_sample_s, constants.floor_s
        ) * neighbours_factor(constants.neighbour_slowdown, self.num_on_fullest)
        slowest = slowest_s(compute, constants.straggler_spread, self.expected_maxima)
        tail = min(constants.tail_fraction, 1.0)
        total = overlapped_s(slowest, communication, 1 + constants.overlap_beyond_sum, tail)
        return _Parts(compute, slowest, communication, total)


def _fit(observations: Sequence[Observation], near: Calibration | None = None) -> Calibration:
    """The fit, from several starts, or from the constants of another fit of nearly the same rows."""
    from scipy.optimize import least_squares  # takes its time to load

    if not observations:
        raise JobError("There is no measured row to fit; measure one device and two devices at least.")
    placements = [observation.placement for observation in observations]
    gradient_bytes, link = _common(placements)
    # The row that says most about computing alone: fewest workers, then the largest micro-batch.
    anchor = min(observations, key=lambda row: (row.placement.layout.num_workers, -row.placement.micro_batch_size))
    priors = _priors(anchor.step_time_s, anchor.placement.micro_batch_size, gradient_bytes, link).values()
    medians = np.log([prior.median for prior in priors])
    deviations = np.array([prior.deviation for prior in priors])
    lowest, highest = medians - _FARTHEST * deviations, medians + _FARTHEST * deviations
    steps = _Steps.of(placements, gradient_bytes or UNKNOWN_GRADIENT_BYTES, link)
    measured = np.log([observation.step_time_s for observation in observations])
    compute_only = np.log([_compute_only_s(observation) for observation in observations])
    with_compute = np.flatnonzero(np.isfinite(compute_only))
    num_measured = len(measured) + len(with_compute)

    def misses(logs: Array) -> Array:
        """log(forecast / measured), of steps and then of computing by itself where that was measured."""
        constants = _constants(logs)
        parts = steps.parts(constants, steps.communication_s(constants))
        return np.concatenate(
            [np.log(parts.total_s) - measured, (np.log(parts.compute_s) - compute_only)[with_compute]]
        )

    def jacobian(logs: Array, error: float) -> Array:
        of_total, of_compute = _slopes(steps, logs, np.full(len(logs), _TINY_STEP))
        return np.concatenate([of_total / error, of_compute[with_compute] / error, np.diag(1 / deviations)])

    def residuals(logs: Array, error: float) -> Array:
        return np.concatenate([misses(logs) / error, (logs - medians) / deviations])

    def misfit(logs: Array, error: float) -> float:
        return float(_long_tailed(np.square(residuals(logs, error)), num_measured)[0].sum())

    def solve(start: Array, error: float) -> Any:
        return least_squares(
            lambda logs: residuals(logs, error),
            np.clip(start, lowest, highest),
            jac=lambda logs: jacobian(logs, error),
            bounds=(lowest, highest),
            loss=lambda squares: _long_tailed(squares, num_measured),
            x_scale=deviations,
            ftol=1e-5,
            xtol=1e-5,
            max_nfev=60,
        )

    if near is None:
        # Whether gradients or computing take longer can look alike in few rows; a start on either side tells.
        between = np.arange(len(medians)) == CONSTANT_NAMES.index("between_beta_s_per_byte")
        starts = [medians + shift * deviations * between for shift in (0.0, 1.5)]
        error, num_rounds = 0.05, 3
    else:
        starts, error, num_rounds = [_logs(near.constants)], near.error, 1
    solution = min((solve(start, error) for start in starts), key=lambda result: float(result.cost))
    for _ in range(num_rounds):
        error = _error_left(misses(solution.x)[: len(measured)], error, solution.jac, len(medians))
        solution = solve(solution.x, error)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)
    return Calibration(
        constants=_constants(solution.x),
        covariance=covariance,
        axis_ends=_axis_ends(solution.x, covariance, lambda logs: misfit(logs, error)),
        error=error,
        gradient_bytes=gradient_bytes or UNKNOWN_GRADIENT_BYTES,
        link_bytes_per_s=link,
    )


def _common(placements: Sequence[Placement]) -> tuple[float | None, float | None]:
    """The usual gradient_bytes and link_bytes_per_s of the rows that tell."""
    sizes = [placement.gradient_bytes for placement in placements if placement.gradient_bytes is not None]
    links = [placement.link_bytes_per_s for placement in placements if placement.link_bytes_per_s is not None]
    return (float(np.median(sizes)) if sizes else None), (float(np.median(links)) if links else None)


def _compute_only_s(observation: Observation) -> float:
    """What a worker computed, where the time it waited was measured; NaN elsewhere."""
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


def _logs(constants: Constants) -> Array:
    return np.log([getattr(constants, name) for name in CONSTANT_NAMES])


def _constants(logs: Array) -> Constants:
    return Constants(*map(float, np.exp(logs)))


def _slopes(steps: _Steps, logs: Array, widths: Array) -> tuple[Array, Array]:
    """d log(step) and d log(compute) over d log(constant), by differences; a row a step, a column a constant."""
    constants = _constants(logs)
    communication = steps.communication_s(constants)
    parts = steps.parts(constants, communication)
    of_total, of_compute = [], []
    for name, log, width in zip(CONSTANT_NAMES, logs, widths, strict=True):
        moved = replace(constants, **{name: math.exp(log + width)})
        there = steps.parts(moved, steps.communication_s(moved) if name in _OF_LINKS else communication)
        of_total.append(np.log(there.total_s / parts.total_s) / width)
        of_compute.append(np.log(there.compute_s / parts.compute_s) / width)
    return np.stack(of_total, axis=1), np.stack(of_compute, axis=1)
