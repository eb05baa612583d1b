"""The constants of the step's model, what hardware usually has, and the steps that a set of constants makes.

step = overlapped(slowest(compute), sum of gradients)        see step_time and collectives
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import JobError
from paceline.plan.collectives import COSTS
from paceline.plan.model import AlphaBeta, Layout, Network
from paceline.plan.step_time import compute_s, expected_maximum, neighbours_factor, overlapped_s, slowest_s
from paceline.spec import AlgorithmName

Array = NDArray[np.float64]

UNKNOWN_GRADIENT_BYTES = 100e6
"""Stands in where no row tells: the constants of the links are then right for this size, and forecasts for any."""

TINY_STEP = 1e-5
"""In the logarithm of a constant, for a slope."""


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
    """The time that a worker waited for gradients; the rest of the step is an average worker's compute time."""


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
    """The fraction of communication that is never hidden."""
    straggler_spread: float
    """Standard deviation over mean of one worker's computing time."""
    neighbour_slowdown: float
    """Slowdown of workers by others on the same node, as a fraction of their compute time."""

    def network(self, layout: Layout, link_ratio: float = 1.0) -> Network:
        """The links as this layout sees them.

        Args:
            link_ratio: how many times slower the link between nodes is than the one the constants are for.
        """
        nodes = layout.num_nodes
        slowdown = 1 + self.pair_slowdown if nodes == 2 else 1 + self.growth_slowdown * math.log2(max(nodes, 2) / 2)
        return Network(
            inside=AlphaBeta(self.inside_alpha_s, self.inside_beta_s_per_byte),
            between=AlphaBeta(self.between_alpha_s, self.between_beta_s_per_byte * slowdown * link_ratio),
        )


@dataclass(frozen=True)
class Prior:
    """What a constant is before anything is measured: most likely within a factor of e^deviation of the median."""

    median: float
    deviation: float


CONSTANT_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Constants))
_OF_LINKS = frozenset(name for name in CONSTANT_NAMES if name.startswith(("inside", "between", "pair", "growth")))
"""The constants that decide what a sum costs; the others leave it as it is."""


def priors_of(
    step_s: float, micro_batch_size: int, gradient_bytes: float | None, link: float | None
) -> dict[str, Prior]:
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


def usual_sizes(placements: Sequence[Placement]) -> tuple[float | None, float | None]:
    """The usual gradient_bytes and link_bytes_per_s of the rows that tell."""
    sizes = [placement.gradient_bytes for placement in placements if placement.gradient_bytes is not None]
    links = [placement.link_bytes_per_s for placement in placements if placement.link_bytes_per_s is not None]
    return (float(np.median(sizes)) if sizes else None), (float(np.median(links)) if links else None)


@dataclass(frozen=True)
class StepParts:
    """Seconds of many steps: an array [num_steps] for each part of a step."""

    compute_s: Array
    slowest_s: Array
    communication_s: Array
    total_s: Array


@dataclass(frozen=True)
class StepArrays:
    """Placements as arrays; what a sum costs is asked once for those that share everything it depends on."""

    micro_batch_sizes: Array
    num_on_fullest: Array
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

    def parts(self, constants: Constants, communication: Array) -> StepParts:
        compute = compute_s(
            self.micro_batch_sizes, constants.fixed_s, constants.per_sample_s, constants.floor_s
        ) * neighbours_factor(constants.neighbour_slowdown, self.num_on_fullest)
        slowest = slowest_s(compute, constants.straggler_spread, self.expected_maxima)
        tail = min(constants.tail_fraction, 1.0)
        total = overlapped_s(slowest, communication, 1 + constants.overlap_beyond_sum, tail)
        return StepParts(compute, slowest, communication, total)


def logs_of(constants: Constants) -> Array:
    return np.log([getattr(constants, name) for name in CONSTANT_NAMES])


def constants_of(logs: Array) -> Constants:
    return Constants(*map(float, np.exp(logs)))


def slopes(steps: StepArrays, logs: Array, widths: Array) -> tuple[Array, Array]:
    """d log(step) and d log(compute) over d log(constant), by differences; a row a step, a column a constant."""
    constants = constants_of(logs)
    communication = steps.communication_s(constants)
    parts = steps.parts(constants, communication)
    of_total, of_compute = [], []
    for name, log, width in zip(CONSTANT_NAMES, logs, widths, strict=True):
        moved = replace(constants, **{name: math.exp(log + width)})
        there = steps.parts(moved, steps.communication_s(moved) if name in _OF_LINKS else communication)
        of_total.append(np.log(there.total_s / parts.total_s) / width)
        of_compute.append(np.log(there.compute_s / parts.compute_s) / width)
    return np.stack(of_total, axis=1), np.stack(of_compute, axis=1)
