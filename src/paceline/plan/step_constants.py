"""The constants of the step's model, what hardware usually has, and the steps that constants make.

step = (passes - 1) * pass + overlapped(slowest(last pass), sum of gradients) + update        see step_time, collectives
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.plan.collectives import cost_of
from paceline.plan.model import Layout, Network
from paceline.plan.step_time import (
    expected_maximum,
    neighbours_factor,
    overlapped_s,
    slowest_s,
    smooth_max,
)
from paceline.spec import AlgorithmName
from paceline.spec.algorithm import AlphaBeta

Array = NDArray[np.float64]

UNKNOWN_GRADIENT_BYTES = 100e6
"""Stands in where no row tells: the constants of the links are then right for this size, and forecasts for any."""

_RDMA_BYTES_PER_S = 5e9
"""40 Gbit/s and more of a datasheet are InfiniBand, RoCE or their like."""
_HOST_SHARPNESS = 8.0
"""How abruptly the host becomes the limit of a node."""


@dataclass(frozen=True)
class Placement:
    """A step that is to be measured or forecast."""

    layout: Layout
    micro_batch_size: int
    """Samples of one pass of one worker."""
    algorithm: AlgorithmName = "all_reduce"
    gradient_bytes: float | None = None
    """None: as in the other rows."""
    link_bytes_per_s: float | None = None
    """The datasheet's figure of a node's link to the others; None: as in the other rows."""
    num_passes: int = 1
    """Passes of a worker in a step, which accumulate gradients and then sum them once."""

    @property
    def passes_name(self) -> str:
        """ "32", or "4 x 32" for several passes a step."""
        return f"{self.num_passes} x {self.micro_batch_size}" if self.num_passes > 1 else str(self.micro_batch_size)

    @property
    def samples_per_device(self) -> int:
        """Samples that one worker computes in a step."""
        return self.micro_batch_size * self.num_passes

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_device * self.layout.num_workers


@dataclass(frozen=True)
class Observation:
    """A measured step."""

    placement: Placement
    step_time_s: float
    sync_time_s: float | None = None
    """The time that a worker waited for gradients; the rest of the step is an average worker's compute time."""

    @property
    def num_samples(self) -> int:
        """The samples that one worker computes in a step."""
        return self.placement.samples_per_device


@dataclass(frozen=True)
class Constants:
    """What is fitted; all of it positive: a number each, or an array [num_samples, 1] of many possible values."""

    per_sample_s: Any
    fixed_s: Any
    """Seconds of a pass beside its samples: launching kernels."""
    host_s_per_sample: Any
    """Seconds that a node's host needs for a sample of any of its devices: loading, host memory."""
    joint_slowdown: Any
    """Slowdown of computing as soon as there are several workers, as a fraction of compute time: gradients are copied
    into buckets and back, and sums take processors from computing."""
    neighbour_slowdown: Any
    """Slowdown of workers by others on the same node, as a fraction of their compute time."""
    straggler_spread: Any
    """Standard deviation over mean of one worker's computing time."""
    inside_alpha_s: Any
    """Latency of messages inside a node: the sum over the buckets in which a step's gradients travel."""
    inside_beta_s_per_byte: Any
    shared_beta_s_per_byte: Any
    """What each device of a node adds to the time of a byte inside it: a bus, a root or a memory that they share."""
    between_alpha_s: Any
    between_beta_s_per_byte: Any
    """Seconds a byte takes between the nodes of three or more."""
    pair_slowdown: Any
    """Two nodes alone have one path between them, whose flows a cloud caps: each byte takes 1 + this as long."""
    growth_slowdown: Any
    """Each doubling of the nodes beyond two makes a byte take longer by this part: they share switches."""
    several_nodes_s: Any
    """Seconds that a step of several nodes takes longer, whatever they send."""
    overlap_beyond_sum: Any
    """The exponent of the overlap, less 1: 0 is none."""
    tail_fraction: Any
    """The fraction of communication that is never hidden."""

    def network(self, layout: Layout, link_ratio: float = 1.0) -> Network:
        """The links as this layout sees them.

        Args:
            link_ratio: how many times slower the link between nodes is than the one the constants are for.
        """
        nodes, on_node = layout.num_nodes, max(layout.workers_per_node)
        slowdown = 1 + self.pair_slowdown if nodes == 2 else 1 + self.growth_slowdown * math.log2(max(nodes, 2) / 2)
        inside = self.inside_beta_s_per_byte + on_node * self.shared_beta_s_per_byte
        return Network(
            inside=AlphaBeta(self.inside_alpha_s, inside),
            between=AlphaBeta(self.between_alpha_s, self.between_beta_s_per_byte * slowdown * link_ratio),
        )

    @classmethod
    def at(cls, priors: Mapping[str, Prior], coordinates: Array) -> Constants:
        """The constants at points of the priors.

        Args:
            coordinates: [num_samples, at least num_constants]: deviations from the medians, in standard deviations.
        """
        values: dict[str, Array] = {}
        for place, (name, prior) in enumerate(priors.items()):
            value = prior.median * np.exp(prior.deviation * coordinates[:, place : place + 1])
            if prior.times:
                value = value * sum(values[other] for other in prior.times)
            values[name] = value + prior.least
        return cls(**values)


@dataclass(frozen=True)
class Prior:
    """What a constant is before anything is measured: `least`, and beyond it most likely within a factor of
    e^deviation of the median."""

    median: float
    deviation: float
    least: float = 0.0
    times: tuple[str, ...] = ()
    """Earlier constants; the value is that many times their sum."""


CONSTANT_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Constants))

USUAL: Mapping[str, Prior] = MappingProxyType(
    {
        # Parts of the time of a pass.
        "per_sample_s": Prior(0.9, 0.3),
        "host_s_per_sample": Prior(0.02, 1.8),
        # Seconds, of a step that is not short.
        "fixed_s": Prior(0.01, 1.0),
        "inside_alpha_s": Prior(5e-5, 1.2),  # ten buckets at 5 us
        "inside_beta_s_per_byte": Prior(0.02, 1.5),  # times the bytes of the gradients
        "shared_beta_s_per_byte": Prior(0.001, 2.3),  # times the bytes of the gradients
        "between_alpha_s": Prior(3e-4, 1.2),  # ten buckets at 30 us
        "several_nodes_s": Prior(0.012, 1.5),
        # A network is a few times slower than the links inside a node.
        "between_beta_s_per_byte": Prior(3.0, 1.2, times=("inside_beta_s_per_byte", "shared_beta_s_per_byte")),
        "joint_slowdown": Prior(0.0025, 1.5),
        "neighbour_slowdown": Prior(0.01, 1.5),
        "straggler_spread": Prior(0.015, 1.5),
        "pair_slowdown": Prior(0.1, 1.2),
        "growth_slowdown": Prior(0.1, 1.0),
        "overlap_beyond_sum": Prior(6.0, 0.6),
        "tail_fraction": Prior(0.06, 0.8),
    }
)
"""Priors of the constants for hardware of which nothing is known."""

_LONG_STEP_S = 0.3
"""A shorter step is one of a smaller model or a faster device, whose launches and sums are shorter too."""


def priors_of(
    step_s: float,
    micro_batch_size: int,
    gradient_bytes: float | None,
    link: float | None,
    num_passes: int = 1,
    usual: Mapping[str, Prior] = USUAL,
) -> dict[str, Prior]:
    """What hardware usually has, around a single step that took `step_s`.

    Whatever is no computing has an absolute scale: launching the kernels of a pass and the optimizer takes
    milliseconds, and sums of gradients take tens of them, also where many passes make a step of minutes.
    Without the size of gradients, links are known only by how long a sum takes.
    """
    sample_s = step_s / num_passes / micro_batch_size
    of_pass, of_step = min(1.0, step_s / num_passes / _LONG_STEP_S), min(1.0, step_s / _LONG_STEP_S)
    of_byte = of_step / (gradient_bytes or UNKNOWN_GRADIENT_BYTES)
    scales = {
        "per_sample_s": sample_s,
        "host_s_per_sample": sample_s,
        "fixed_s": of_pass,
        "inside_alpha_s": of_step,
        "inside_beta_s_per_byte": of_byte,
        "shared_beta_s_per_byte": of_byte,
        "between_alpha_s": of_step,
        "several_nodes_s": of_step,
    }
    priors = {name: replace(usual[name], median=scales.get(name, 1.0) * usual[name].median) for name in CONSTANT_NAMES}
    if gradient_bytes is not None:
        # Between PCIe 3.0 x16, whose 10 GB/s devices may share, and NVLink with ten times as much.
        priors |= {"inside_beta_s_per_byte": Prior(1 / 30e9, 1.5), "shared_beta_s_per_byte": Prior(0.05 / 30e9, 2.3)}
    # Networks are of two kinds: RDMA as on InfiniBand, and sockets as in most clouds, which cap each flow. A rate of a
    # datasheet is a bound, of which collectives reach most by RDMA, and two thirds or much less by sockets.
    is_rdma = link is not None and link >= _RDMA_BYTES_PER_S
    if link is not None:
        priors["between_beta_s_per_byte"] = Prior((0.15 if is_rdma else 0.5) / link, 1.0, least=1 / link)
    if is_rdma:
        priors |= {
            "between_alpha_s": Prior(1e-4 * of_step, 1.2),
            "pair_slowdown": Prior(0.03, 1.0),
            "several_nodes_s": Prior(0.001 * of_step, 1.0),
        }
    return priors


def usual_sizes(placements: Sequence[Placement]) -> tuple[float | None, float | None]:
    """The usual gradient_bytes and link_bytes_per_s of the rows that tell."""
    sizes = [placement.gradient_bytes for placement in placements if placement.gradient_bytes is not None]
    links = [placement.link_bytes_per_s for placement in placements if placement.link_bytes_per_s is not None]
    return (float(np.median(sizes)) if sizes else None), (float(np.median(links)) if links else None)


@dataclass(frozen=True)
class StepParts:
    """Seconds of many steps: an array [num_samples, num_steps] for each part of a step."""

    compute_s: Array
    """What a worker computes by itself."""
    slowest_s: Array
    """Until the slowest worker has computed, and the host of its node has fed it."""
    communication_s: Array
    total_s: Array


@dataclass(frozen=True)
class StepArrays:
    """Placements as arrays; what a sum costs is asked once for those that share everything it depends on."""

    micro_batch_sizes: Array
    num_passes: Array
    num_on_fullest: Array
    has_nodes: Array
    """1 where there are several nodes, else 0."""
    expected_maxima: Array
    sums: tuple[tuple[Layout, AlgorithmName, float, float], ...]
    """Layout, algorithm, bytes, link ratio of each distinct sum."""
    sum_of: NDArray[np.intp]
    """Which of them each step has."""

    @classmethod
    def of(cls, placements: Sequence[Placement], gradient_bytes: float, link: float | None) -> StepArrays:
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
        layouts = [placement.layout for placement in placements]
        return cls(
            micro_batch_sizes=np.array([placement.micro_batch_size for placement in placements], float),
            num_passes=np.array([placement.num_passes for placement in placements], float),
            num_on_fullest=np.array([max(layout.workers_per_node) for layout in layouts], float),
            has_nodes=np.array([layout.num_nodes > 1 for layout in layouts], float),
            expected_maxima=np.array([expected_maximum(layout.num_workers) for layout in layouts]),
            sums=sums,
            sum_of=np.array([place_of[key] for key in keys], dtype=np.intp),
        )

    def parts(self, constants: Constants) -> StepParts:
        """[num_samples, num_steps] of each part."""
        shape = np.shape(constants.per_sample_s) or (1, 1)
        sums = [
            np.broadcast_to(cost_of(algorithm)(size_bytes, layout, constants.network(layout, link_ratio)), shape)
            for layout, algorithm, size_bytes, link_ratio in self.sums
        ]
        communication = np.concatenate(sums, axis=1)[:, self.sum_of]
        sizes, on_node = self.micro_batch_sizes, self.num_on_fullest
        pass_s = constants.fixed_s + constants.per_sample_s * sizes
        pass_s = pass_s * neighbours_factor(constants.neighbour_slowdown, on_node)
        slowest = slowest_s(pass_s, constants.straggler_spread, self.expected_maxima)
        slowest = slowest * (1 + constants.joint_slowdown * (self.expected_maxima > 0))
        host_s = np.where(on_node > 1, constants.host_s_per_sample * sizes * on_node, 0.0)
        slowest = smooth_max(slowest, host_s, _HOST_SHARPNESS)
        tail = np.minimum(constants.tail_fraction, 1.0)
        last = overlapped_s(slowest, communication, 1 + constants.overlap_beyond_sum, tail)
        total = (self.num_passes - 1) * slowest + last + constants.several_nodes_s * self.has_nodes
        return StepParts(self.num_passes * pass_s, self.num_passes * slowest, communication, total)
