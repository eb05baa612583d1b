"""The step model: how long a training step takes on any workers, and what hardware usually has.

    pass = (fixed + per sample * samples) * slow-down by the other workers of the node
    step = passes * slowest pass, the last of them overlapped with one sum of gradients (`collectives`),
           + update + cost of having several nodes

The slowest pass is that of the slowest worker, or what the host of a node needs to feed its devices if that is longer.
Constants are seconds, seconds a byte, or fractions; all of them are positive. Each is a number, or an array of many
possible values at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.plan.collectives import AlphaBeta, Network, cost_of
from paceline.spec import StepRow

Array = NDArray[np.float64]
Constants = Mapping[str, Any]

UNKNOWN_GRADIENT_BYTES = 100e6
"""Stands in where no row tells: the constants of links are then right for this size, and forecasts for any."""
_RDMA_BYTES_PER_S = 5e9
"""40 Gbit/s and more of a datasheet are InfiniBand, RoCE or their like."""
_HOST_SHARPNESS = 8.0
"""How abruptly the host becomes the limit of a node."""
_LONG_STEP_S = 0.3
"""A shorter step is one of a smaller model or a faster device, whose launches and sums are shorter too."""

Unit = Literal["sample", "pass", "step", "byte", "fraction", "inside byte"]


@dataclass(frozen=True)
class Prior:
    """What a constant is before anything is measured: `least`, and beyond it most likely within a factor of
    e^deviation of the median."""

    median: float
    deviation: float
    unit: Unit
    """What the median is a multiple of: the seconds of a sample, those of a pass or step that is not long, the seconds
    of a step over the bytes of its gradients, nothing, or the time of a byte inside a node."""
    least: float = 0.0


PRIORS: Mapping[str, Prior] = MappingProxyType(
    {
        "per_sample_s": Prior(0.9, 0.3, "sample"),
        # Seconds of a pass beside its samples: launching kernels.
        "fixed_s": Prior(0.01, 1.0, "pass"),
        # Seconds that a node's host needs for a sample of any of its devices: loading, host memory.
        "host_s_per_sample": Prior(0.02, 1.8, "sample"),
        # Slow-down by the other workers of a node, which share memory and power.
        "neighbour_slowdown": Prior(0.015, 1.5, "fraction"),
        # Standard deviation over mean of one worker's pass; all wait for the slowest.
        "straggler_spread": Prior(0.015, 1.5, "fraction"),
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
        "overlap_beyond_sum": Prior(6.0, 0.6, "fraction"),
        # The fraction of a sum that nothing hides: its last bucket.
        "tail_fraction": Prior(0.06, 0.8, "fraction"),
        # Seconds of a step beside its passes: the optimizer. Where all rows make as many passes, `fixed_s` holds it.
        "update_s": Prior(0.003, 1.0, "step"),
    }
)
"""Every constant, and what hardware usually has."""


@dataclass(frozen=True)
class StepModel:
    """The step model around one measured row: priors in seconds and bytes, and the steps that constants make."""

    priors: Mapping[str, Prior]
    anchor: StepRow
    gradient_bytes: float
    """The gradients of rows that do not tell."""
    link_bytes_per_s: float | None
    """The datasheet's rate that `between_beta_s_per_byte` belongs to; None: no row tells."""

    @classmethod
    def around(cls, rows: Sequence[StepRow], inside_bytes_per_s: float | None = None) -> StepModel:
        """The model for rows of one job. Its scale is the row with the fewest workers, and of these the fastest.

        Whatever is no computing has an absolute scale: launching kernels takes milliseconds and a sum of gradients tens
        of them, also where many passes make a step of minutes.

        Args:
            inside_bytes_per_s: a datasheet's rate of the links inside a node, a bound; None: not known.
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
            "byte": of_step / (gradient_bytes or UNKNOWN_GRADIENT_BYTES),
        }
        scaled = {
            name: Prior(prior.median * scales.get(prior.unit, 1.0), prior.deviation, prior.unit, prior.least)
            for name, prior in PRIORS.items()
        }
        if len({row.num_passes for row in rows}) == 1:
            del scaled["update_s"]
        scaled |= _by_datasheet(gradient_bytes, link, of_step)
        if inside_bytes_per_s is not None:
            bound = 1 / inside_bytes_per_s
            scaled["inside_beta_s_per_byte"] = Prior(0.3 * bound, 1.0, "fraction", least=bound)
        return cls(scaled, anchor, gradient_bytes or UNKNOWN_GRADIENT_BYTES, link)

    def constants_at(self, points: Array) -> Constants:
        """The constants, arrays [num_points, 1], at points of the priors.

        Args:
            points: [num_points, num_constants]: deviations from the medians, in standard deviations.
        """
        values: dict[str, Array] = {name: np.zeros((len(points), 1)) for name in PRIORS}
        for place, (name, prior) in enumerate(self.priors.items()):
            value = prior.median * np.exp(prior.deviation * points[:, place : place + 1])
            if prior.unit == "inside byte":
                value = value * (values["inside_beta_s_per_byte"] + values["shared_beta_s_per_byte"])
            values[name] = value + prior.least
        return values

    def steps(self, rows: Sequence[StepRow], constants: Constants) -> StepParts:
        """The parts of each row's step, [num_points, num_rows]."""
        columns = []
        for row in rows:
            link_ratio = (self.link_bytes_per_s or 1.0) / (row.link_bytes_per_s or self.link_bytes_per_s or 1.0)
            size_bytes = row.gradient_bytes or self.gradient_bytes
            network = network_at(constants, row.most_on_node, link_ratio)
            sum_s = cost_of(row.algorithm)(size_bytes, row.workers_per_node, network)
            columns.append(np.broadcast_to(sum_s / row.sync_every, constants["per_sample_s"].shape))
        communication = np.concatenate(columns, axis=1)
        sizes = np.array([row.micro_batch_size for row in rows])
        passes = np.array([row.num_passes for row in rows])
        on_node = np.array([row.most_on_node for row in rows])
        maxima = np.array([expected_maximum(row.num_workers) for row in rows])
        pass_s = constants["fixed_s"] + constants["per_sample_s"] * sizes
        pass_s = pass_s * (1 + constants["neighbour_slowdown"] * (1 - 1 / on_node))
        host_s = np.where(on_node > 1, constants["host_s_per_sample"] * sizes * on_node, 0.0)
        slowest_s = smooth_max(pass_s * (1 + constants["straggler_spread"] * maxima), host_s, _HOST_SHARPNESS)
        # The fixed tree of bitwise parity sums what all passes have made: nothing hides it.
        is_hidden = np.array([row.algorithm != "tree_exact" for row in rows])
        tail_s = np.where(is_hidden, np.minimum(constants["tail_fraction"], 1.0), 1.0) * communication
        last_s = smooth_max(slowest_s, communication - tail_s, 1 + constants["overlap_beyond_sum"])
        update_s = constants["update_s"]
        total_s = (passes - 1) * slowest_s + last_s + tail_s + update_s
        total_s = total_s + constants["several_nodes_s"] * np.array([row.num_nodes > 1 for row in rows])
        return StepParts(passes * pass_s, passes * slowest_s + update_s, communication, total_s)


@dataclass(frozen=True)
class StepParts:
    """Seconds of many steps: an array [num_points, num_rows] for each part of a step."""

    compute_s: Array
    """What a worker computes by itself."""
    slowest_s: Array
    """Until the slowest worker has computed, and the host of its node has fed it; the update with it."""
    communication_s: Array
    total_s: Array


def network_at(constants: Constants, most_on_node: int, link_ratio: float = 1.0) -> Network:
    """The links as up to `most_on_node` workers of a node see them.

    Args:
        link_ratio: how many times slower the link between nodes is than the one the constants are for.
    """
    inside = constants["inside_beta_s_per_byte"] + most_on_node * constants["shared_beta_s_per_byte"]
    between = constants["between_beta_s_per_byte"] * link_ratio
    return Network(AlphaBeta(constants["inside_alpha_s"], inside), AlphaBeta(constants["between_alpha_s"], between))


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
    quantile, count = NormalDist().inv_cdf, 1000
    if num_workers == 1:
        return 0.0
    return fmean(quantile(((place + 0.5) / count) ** (1 / num_workers)) for place in range(count))


def _by_datasheet(gradient_bytes: float | None, link: float | None, of_step: float) -> dict[str, Prior]:
    """Priors of links where the size of gradients or a datasheet's rate of the network is known.

    Links inside a node lie between PCIe 3.0 x16, whose 10 GB/s devices may share, and NVLink with ten times as much.
    Networks are of two kinds: RDMA as on InfiniBand, and sockets as in most clouds, which cap each flow. A datasheet's
    rate is a bound, of which collectives reach most by RDMA, and two thirds or much less by sockets.
    """
    found: dict[str, Prior] = {}
    if gradient_bytes is not None:
        found["inside_beta_s_per_byte"] = Prior(1 / 30e9, 1.5, "fraction")
        found["shared_beta_s_per_byte"] = Prior(0.05 / 30e9, 2.3, "fraction")
    is_rdma = link is not None and link >= _RDMA_BYTES_PER_S
    if link is not None:
        found["between_beta_s_per_byte"] = Prior((0.15 if is_rdma else 0.5) / link, 1.0, "fraction", least=1 / link)
    if is_rdma:
        found["between_alpha_s"] = Prior(1e-4 * of_step, 1.2, "fraction")
        found["several_nodes_s"] = Prior(0.001 * of_step, 1.0, "fraction")
    return found


def _median(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return float(np.median(told)) if told else None
