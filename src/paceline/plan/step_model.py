"""The step model: how long a training step takes on any workers, fitted to steps that were measured.

    pass = (fixed + per sample * samples) * slow-down by the other workers of the node
    step = passes * slowest pass, the last of them overlapped with one sum of gradients (`collectives`),
           + update + cost of having several nodes

The slowest pass is that of the slowest worker, or what the host of a node needs to feed its devices if that is longer.
Constants are seconds, seconds a byte, or fractions; all of them are positive. Each is a number, or an array of many
possible values at once.

A fit is not one set of constants but many, equally likely after what was measured; a forecast is the middle of the
steps that they make, its interval their spread and the errors of a row and of a sum. Errors are factors, not seconds:
log(measured / forecast) follows Student's t distribution, so that one bad row does not distort the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.plan.collectives import Network, cost_of
from paceline.spec import StepRow

Array = NDArray[np.float64]
Constants = Mapping[str, Any]

_UNKNOWN_GRADIENT_BYTES = 100e6
"""Stands in where no row tells: the constants of links are then right for this size, and forecasts for any."""
_RDMA_BYTES_PER_S = 5e9
"""40 Gbit/s and more of a datasheet are InfiniBand, RoCE or their like."""
_HOST_SHARPNESS = 8.0
"""How abruptly the host becomes the limit of a node."""
_LONG_STEP_S = 0.3
"""A shorter step is one of a smaller model or a faster device, whose launches and sums are shorter too."""

_ROW_ERROR = 0.012
"""The usual error of a row, as the scale of log(measured / forecast)."""
_ERROR_ROWS = 4.0
"""The weight of `_ROW_ERROR` beside the errors of measured rows, as a number of rows."""
_UNSEEN_ERROR = 0.025
"""The model's error on rows that were not measured, as on published tables; it only widens intervals."""
_SUM_ERROR = 0.115
"""The same of a sum of gradients. With constants fitted to all 1,512 steps of one job on Pollux's cluster (CIFAR-10),
steps that are sums miss by so much, and those that hide their sums by 0.038."""
_FREEDOM = 4.0
"""Degrees of freedom of errors: one row in a hundred misses by more than five times their scale."""
_NUM_STEPS = 30
_NUM_SAMPLES, _NUM_MOVES = 2000, 24
_SEED = 20260701  # the same rows have the same forecast

Unit = Literal["sample", "pass", "step", "byte", "fraction", "inside byte"]


@dataclass(frozen=True)
class Prior:
    """What is known of a constant before anything is measured: it is `least` plus an amount that is most likely within
    a factor of e^deviation of the median."""

    median: float
    deviation: float
    unit: Unit = "fraction"
    """What the median is a multiple of: the seconds of a sample, those of a pass or step that is not long, the seconds
    of a step over the bytes of its gradients, nothing, or the time of a byte inside a node."""
    least: float = 0.0


PRIORS: Mapping[str, Prior] = {
    "per_sample_s": Prior(0.9, 0.3, "sample"),
    # Seconds of a pass beside its samples: launching kernels.
    "fixed_s": Prior(0.01, 1.0, "pass"),
    # Seconds that a node's host needs for a sample of any of its devices: loading, host memory.
    "host_s_per_sample": Prior(0.02, 1.8, "sample"),
    # Slow-down by the other workers of a node, which share memory and power.
    "neighbour_slowdown": Prior(0.015, 1.5),
    # Standard deviation over mean of one worker's pass; all wait for the slowest.
    "straggler_spread": Prior(0.015, 1.5),
    # Latency of all messages of a step's sum inside a node: ten buckets at 5 us.
    "inside_alpha_s": Prior(5e-5, 1.2, "step"),
    "inside_beta_s_per_byte": Prior(0.02, 1.5, "byte"),
    # What each device of a node adds to the time of a byte inside it: a bus, a root or a memory that they share.
    "shared_beta_s_per_byte": Prior(0.001, 2.3, "byte"),
    # The same between nodes: ten buckets at 30 us, and a network is a few times slower than links inside a node.
    "between_alpha_s": Prior(3e-4, 1.2, "step"),
    "between_beta_s_per_byte": Prior(3.0, 1.2, "inside byte"),
    # Seconds that a step of several nodes takes longer, whatever they send.
    "several_nodes_s": Prior(0.012, 1.5, "step"),
    # The exponent of the overlap, less 1: 0 is none.
    "overlap_beyond_sum": Prior(6.0, 0.6),
    # The fraction of a sum that nothing hides: its last bucket.
    "tail_fraction": Prior(0.06, 0.8),
    # Seconds of a step beside its passes: the optimizer. Where all rows make as many passes, `fixed_s` holds it.
    "update_s": Prior(0.003, 1.0, "step"),
}
"""Every constant, and what hardware usually has."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of many steps: an array [num_points, num_rows] for each part of a step."""

    compute_s: Array
    """What a worker computes by itself."""
    slowest_s: Array
    """Until the slowest worker has computed, and the host of its node has fed it; the update with it."""
    communication_s: Array
    total_s: Array


@dataclass(frozen=True)
class StepModel:
    """The step model of one job: measured rows, priors in seconds and bytes, and the steps that constants make."""

    priors: Mapping[str, Prior]
    rows: Sequence[StepRow]
    gradient_bytes: float
    """The gradients of rows that do not tell."""
    link_bytes_per_s: float | None
    """The datasheet's rate that `between_beta_s_per_byte` belongs to; None: no row tells."""

    @classmethod
    def around(cls, rows: Sequence[StepRow], inside_bytes_per_s: float | None = None) -> StepModel:
        """The model for rows of one job. Its scale is the row with the fewest workers, and of these the fastest.

        Whatever is no computing has an absolute scale: launching kernels takes milliseconds and a sum of gradients tens
        of them, also where many passes make a step of minutes.

        Links inside a node lie between PCIe 3.0 x16, whose 10 GB/s devices may share, and NVLink with ten times as
        much. Networks are of two kinds: RDMA as on InfiniBand, and sockets as in most clouds, which cap each flow. A
        datasheet's rate is a bound, of which collectives reach most by RDMA, and two thirds or much less by sockets.
        """
        gradient_bytes = _median([row.gradient_bytes for row in rows])
        link = _median([row.link_bytes_per_s for row in rows])
        anchor = min(rows, key=lambda row: (row.num_workers, seconds_of(row) / row.samples_per_worker))
        step_s = seconds_of(anchor)
        of_step = min(1.0, step_s / _LONG_STEP_S)
        scales: dict[Unit, float] = {
            "sample": step_s / anchor.samples_per_worker,
            "pass": min(1.0, step_s / anchor.num_passes / _LONG_STEP_S),
            "step": of_step,
            "byte": of_step / (gradient_bytes or _UNKNOWN_GRADIENT_BYTES),
        }
        scaled = {
            name: Prior(prior.median * scales.get(prior.unit, 1.0), prior.deviation, prior.unit)
            for name, prior in PRIORS.items()
        }
        if len({row.num_passes for row in rows}) == 1:
            del scaled["update_s"]
        if gradient_bytes is not None:
            scaled["inside_beta_s_per_byte"] = Prior(1 / 30e9, 1.5)
            scaled["shared_beta_s_per_byte"] = Prior(0.05 / 30e9, 2.3)
        if inside_bytes_per_s is not None:
            scaled["inside_beta_s_per_byte"] = Prior(0.3 / inside_bytes_per_s, 1.0, least=1 / inside_bytes_per_s)
        is_rdma = link is not None and link >= _RDMA_BYTES_PER_S
        if link is not None:
            scaled["between_beta_s_per_byte"] = Prior((0.15 if is_rdma else 0.5) / link, 1.0, least=1 / link)
        if is_rdma:
            scaled["between_alpha_s"] = Prior(1e-4 * of_step, 1.2)
            scaled["several_nodes_s"] = Prior(0.001 * of_step, 1.0)
        return cls(scaled, rows, gradient_bytes or _UNKNOWN_GRADIENT_BYTES, link)

    def constants_at(self, points: Array) -> Constants:
        """The constants, arrays [num_points, 1], at points of the priors. `points`: [num_points, num_constants]:
        deviations from the medians, in standard deviations."""
        values: dict[str, Array] = {name: np.zeros((len(points), 1)) for name in PRIORS}
        for place, (name, prior) in enumerate(self.priors.items()):
            value = prior.median * np.exp(prior.deviation * points[:, place : place + 1])
            if prior.unit == "inside byte":
                value = value * (values["inside_beta_s_per_byte"] + values["shared_beta_s_per_byte"])
            values[name] = value + prior.least
        return values

    def steps(self, rows: Sequence[StepRow], constants: Constants) -> StepParts:
        """The parts of each row's step."""
        columns = []
        for row in rows:
            link_ratio = (self.link_bytes_per_s or 1.0) / (row.link_bytes_per_s or self.link_bytes_per_s or 1.0)
            network = network_at(constants, row.most_on_node, link_ratio)
            sum_s = cost_of(row.algorithm)(row.gradient_bytes or self.gradient_bytes, row.workers_per_node, network)
            columns.append(np.broadcast_to(sum_s / row.sync_every, constants["per_sample_s"].shape))
        communication_s = np.concatenate(columns, axis=1)
        sizes = np.array([row.micro_batch_size for row in rows])
        passes = np.array([row.num_passes for row in rows])
        on_node = np.array([row.most_on_node for row in rows])
        waits = constants["straggler_spread"] * np.array([expected_maximum(row.num_workers) for row in rows])
        pass_s = pass_at(constants, sizes, on_node)
        host_s = np.where(on_node > 1, constants["host_s_per_sample"] * sizes * on_node, 0.0)
        slowest_s = smooth_max(pass_s * (1 + waits), host_s, _HOST_SHARPNESS)
        # The fixed tree of bitwise parity sums what all passes have made: nothing hides it.
        is_hidden = np.array([row.algorithm != "tree_exact" for row in rows])
        tail_s = np.where(is_hidden, np.minimum(constants["tail_fraction"], 1.0), 1.0) * communication_s
        last_s = smooth_max(slowest_s, communication_s - tail_s, 1 + constants["overlap_beyond_sum"])
        total_s = (passes - 1) * slowest_s + last_s + tail_s + constants["update_s"]
        total_s = total_s + constants["several_nodes_s"] * np.array([row.num_nodes > 1 for row in rows])
        return StepParts(passes * pass_s, passes * slowest_s + constants["update_s"], communication_s, total_s)


def pass_at(constants: Constants, num_samples: Any, most_on_node: Any) -> Any:
    """Seconds of a forward and backward pass over so many samples beside the other workers of a node."""
    slowdown = 1 + constants["neighbour_slowdown"] * (1 - 1 / most_on_node)
    return (constants["fixed_s"] + constants["per_sample_s"] * num_samples) * slowdown


def network_at(constants: Constants, most_on_node: int, link_ratio: float = 1.0) -> Network:
    """The links as up to `most_on_node` workers of a node see them. `link_ratio`: how many times slower the link
    between nodes is than the one the constants are for."""
    inside = constants["inside_beta_s_per_byte"] + most_on_node * constants["shared_beta_s_per_byte"]
    between = constants["between_beta_s_per_byte"] * link_ratio
    return Network(constants["inside_alpha_s"], inside, constants["between_alpha_s"], between)


def seconds_of(row: StepRow) -> float:
    """The measured time of a step."""
    assert row.step_time_s is not None
    return row.step_time_s


def smooth_max(one: Any, other: Any, exponent: Any) -> Any:
    """(one^e + other^e)^(1/e): the sum for e = 1, the maximum for e -> infinity (Qiao et al. 2021, "Pollux", 3.2)."""
    top = np.maximum(np.maximum(one, other), 1e-300)  # divided out, so that no power overflows
    return top * ((one / top) ** exponent + (other / top) ** exponent) ** (1 / exponent)


@lru_cache(maxsize=4096)
def expected_maximum(num_workers: int) -> float:
    """The mean of the maximum of n independent standard normal numbers: 0 for one, 0.564 for two, about sqrt(2 ln n).

    The maximum has the distribution F(x)^n (David and Nagaraja 2003, "Order Statistics", 2.1), so that it is the mean
    of its quantiles, those of F at u^(1/n).
    """
    places = (np.arange(1000) + 0.5) / 1000
    return fmean(map(NormalDist().inv_cdf, places ** (1 / num_workers)))


def _median(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return float(np.median(told)) if told else None


@dataclass(frozen=True)
class StepForecast:
    """The forecast time of one training step, and its components."""

    step_s: float
    compute_s: float
    communication_s: float
    """Time of all communication, hidden or not."""
    overhead_s: float
    """Waiting for the slowest worker and for the host, and the optimizer."""
    low_s: float
    high_s: float
    """The 90 % prediction interval of a measured step."""

    @property
    def exposed_s(self) -> float:
        """Time of exposed communication, which compute does not hide, and what several nodes cost."""
        return self.step_s - self.compute_s - self.overhead_s


@dataclass(frozen=True)
class Fit:
    """Samples of the constants, all equally likely after what was measured."""

    model: StepModel
    constants: Constants
    """Arrays [num_samples, 1]."""
    error: float
    """The scale of log(measured / forecast) of a row."""

    @cached_property
    def typical(self) -> dict[str, float]:
        """The median of each constant."""
        return {name: float(np.median(values)) for name, values in self.constants.items()}


def fit(rows: Sequence[StepRow], inside_bytes_per_s: float | None = None) -> Fit:
    """Samples of the constants that are consistent with measured rows, one at least. Raises `JobError` where a row has
    an algorithm without a cost formula. `inside_bytes_per_s`: a datasheet's rate of the links inside a node, a bound;
    None: not known."""
    model = StepModel.around(rows, inside_bytes_per_s)
    error = _row_error(model, rows)
    spread = float(np.median([row.spread for row in rows]))  # of the times of a measured step
    return Fit(model, model.constants_at(_drawn(model, rows, error)), math.hypot(error, spread))


def _drawn(model: StepModel, rows: Sequence[StepRow], error: float) -> Array:
    """[num_samples, num_constants]: points of the priors, as probable as the rows make them.

    They begin as draws from the priors, so that what the rows leave open stays open. Step by step more of the rows'
    logarithmic likelihood counts, as much as leaves half of the points with weight: they are drawn again by weight, and
    moved (Del Moral, Doucet and Jasra 2006, "Sequential Monte Carlo samplers"). A move goes along the line to a point
    of the other half (Goodman and Weare 2010, "Ensemble samplers with affine invariance").
    """

    def likelihoods(points: Array) -> Array:
        squares = np.square(_misses(model, rows, points) / error)
        return np.asarray(-(_FREEDOM + 1) / 2 * np.log1p(squares / _FREEDOM).sum(axis=1))

    random, num_constants, counting = np.random.default_rng(_SEED), len(model.priors), 0.0
    points = random.normal(size=(_NUM_SAMPLES, num_constants))
    logs = likelihoods(points)
    while counting < 1.0:
        more = 1.0 - counting
        while (weights := np.exp(more * (logs - logs.max()))).sum() ** 2 < _NUM_SAMPLES / 2 * np.square(weights).sum():
            more *= 0.7
        counting, ends = counting + more, np.cumsum(weights)
        places = np.searchsorted(ends, (np.arange(_NUM_SAMPLES) + 0.5) / _NUM_SAMPLES * ends[-1])
        random.shuffle(places)
        points, logs = points[places], logs[places]
        for turn in range(2 * _NUM_MOVES):
            moving, others = np.roll(np.arange(_NUM_SAMPLES).reshape(2, -1), turn, axis=0)
            origins = points[random.permutation(others)]
            stretch = np.square(1 + random.random(len(moving))) / 2
            moved = origins + stretch[:, None] * (points[moving] - origins)
            found = likelihoods(moved)
            gains = counting * (found - logs[moving]) + (num_constants - 1) * np.log(stretch)
            gains += (np.square(points[moving]) - np.square(moved)).sum(axis=1) / 2
            taken = np.log(random.random(len(moving))) < gains
            points[moving[taken]], logs[moving[taken]] = moved[taken], found[taken]
    return points


def _row_error(model: StepModel, rows: Sequence[StepRow]) -> float:
    """The scale of a row's error, by what rows miss with the most probable constants, less what fitting these takes
    (MacKay 1992, "Bayesian interpolation", section 4.4).

    Constants by Gauss and Newton's steps, in which rows that miss by more than others weigh less, as Student's t
    distribution has it (Lange, Little and Taylor 1989, "Robust statistical modeling using the t distribution").
    """
    num_constants = len(model.priors)
    best, error, small = np.zeros(num_constants), _ROW_ERROR, 1e-4
    for place in range(_NUM_STEPS):
        # At first all rows weigh the same: else one that needs another constant may be taken for a bad one.
        freedom = 1000.0 if place < _NUM_STEPS / 2 else _FREEDOM
        misses = _misses(model, rows, np.vstack([best, best + small * np.eye(num_constants)]))
        slopes, now = (misses[1:] - misses[0]).T / small, misses[0]
        weights = (freedom + 1) / (freedom + np.square(now / error))
        precision = slopes.T @ (slopes * weights[:, None]) / error**2 + np.eye(num_constants)
        gradient = slopes.T @ (now * weights) / error**2 + best
        best = best - np.clip(np.linalg.solve(precision, gradient), -1.0, 1.0)
        num_fitted = num_constants - float(np.trace(np.linalg.inv(precision)))
        seen = float((weights * np.square(now)).sum())
        error = math.sqrt((_ERROR_ROWS * _ROW_ERROR**2 + seen) / (_ERROR_ROWS + max(0.0, len(now) - num_fitted)))
    return error


def _misses(model: StepModel, rows: Sequence[StepRow], points: Array) -> Array:
    """[num_points, num_errors]: log(forecast / measured), of steps and of what was computed in the rows that told how
    long a worker waited for gradients. `points`: [num_points, num_constants], standard normal before anything is
    measured."""
    parts = model.steps(rows, model.constants_at(points))
    measured = np.array([seconds_of(row) for row in rows])
    apart = [place for place, row in enumerate(rows) if row.sync_time_s is not None]
    waited = np.array([rows[place].sync_time_s for place in apart])
    computed = np.maximum(measured[apart] - waited, 0.01 * measured[apart])
    errors = [parts.total_s / measured, parts.compute_s[:, apart] / computed]
    return np.asarray(np.log(np.concatenate(errors, axis=1)))


def predict(found: Fit, rows: Sequence[StepRow]) -> list[StepForecast]:
    """A forecast for each row: the middle of the samples, and the 90 % interval of a measurement, in which a sum takes
    longer or shorter than the samples say, and so does the step."""
    parts = found.model.steps(rows, found.constants)
    told, most_nodes = [row.num_workers for row in found.model.rows], max(row.num_nodes for row in found.model.rows)
    is_between = [min(told) < row.num_workers < max(told) and row.num_nodes <= most_nodes for row in rows]
    weights = _weights(parts.total_s, np.array(is_between))
    totals = np.exp((weights * np.log(parts.total_s)).sum(axis=0))
    errors, of_sums = np.random.default_rng(_SEED).standard_t(_FREEDOM, size=(2, len(parts.total_s), 1))
    links = [name for name in found.constants if name.endswith(("alpha_s", "beta_s_per_byte"))]
    others = {name: found.constants[name] * np.exp(_SUM_ERROR * of_sums) for name in links}
    measurements = found.model.steps(rows, {**found.constants, **others}).total_s
    measurements *= np.exp(math.hypot(found.error, _UNSEEN_ERROR) * errors)
    lows, highs = np.quantile(measurements, (0.05, 0.95), axis=0)
    # The parts of a forecast are mean fractions of the same samples, so that they add up.
    computing, waited, sending = (
        np.minimum((weights * np.minimum(seconds, parts.total_s) / parts.total_s).sum(axis=0), 1.0) * totals
        for seconds in (parts.compute_s, parts.slowest_s, parts.communication_s)
    )
    waiting = np.maximum(waited - computing, 0.0)
    columns = [totals, computing, sending, waiting, np.minimum(lows, totals), np.maximum(highs, totals)]
    return [StepForecast(*values) for values in np.stack(columns, axis=1).tolist()]


def _weights(totals: Array, is_between: NDArray[np.bool_]) -> Array:
    """[num_samples, num_rows]: the weights of samples in the mean that is a row's forecast, with a sum of 1.

    The mean is geometric: if two explanations fit the rows, it lies between them, while the median jumps from one to
    the other. All samples count between measured rows, `is_between`; beyond them the middle half, because the farthest
    ones are what priors do not exclude. Samples are weighted by 1 / step time, because errors are relative to the
    measured time: if the shorter of two explanations is the true one, a forecast between them has the larger relative
    error.
    """
    order = np.argsort(totals, axis=0)
    weights = 1 / np.take_along_axis(totals, order, axis=0)
    places = (np.cumsum(weights, axis=0) - weights / 2) / weights.sum(axis=0)
    weights[(np.abs(places - 0.5) > 0.25) & ~is_between] = 0.0
    found = np.empty_like(weights)
    np.put_along_axis(found, order, weights / weights.sum(axis=0), axis=0)
    return found
