"""The values that the parts of the planner hand each other: a layout, a network, what a step takes."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.forecast import BoundBy


@dataclass(frozen=True)
class Layout:
    """How workers are spread: how many on each node."""

    workers_per_node: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        return sum(self.workers_per_node)

    @property
    def num_nodes(self) -> int:
        return len(self.workers_per_node)


@dataclass(frozen=True)
class AlphaBeta:
    """One kind of link in the alpha-beta model (Hockney 1994): n bytes take alpha_s + n * beta_s_per_byte one way."""

    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class Network:
    """Links inside a node and between nodes; all workers of a node share its link to the others."""

    inside: AlphaBeta
    between: AlphaBeta
    per_message_s: float = 0.0
    """What the software adds to every message."""


@dataclass(frozen=True)
class StepForecast:
    """What one training step will take, and why."""

    total_s: float
    compute_s: float
    communication_s: float
    """Whether hidden or not."""
    exposed_s: float
    """The part of communication that compute does not hide."""
    loader_s: float
    overhead_s: float
    """Optimizer, launch overhead, waiting for the slowest worker."""
    bound_by: BoundBy
    low_s: float
    high_s: float
    """The 90 % prediction interval of a measured step."""
