"""The values that modules of the planner exchange: a layout, a network, the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.algorithm import AlphaBeta
from paceline.spec.forecast import BoundBy


@dataclass(frozen=True)
class Layout:
    """The number of workers on each node."""

    workers_per_node: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        return sum(self.workers_per_node)

    @property
    def num_nodes(self) -> int:
        return len(self.workers_per_node)

    @property
    def name(self) -> str:
        """ "16 x 4" for 16 equal nodes of 4, else "2+4"."""
        counts = set(self.workers_per_node)
        return f"{self.num_nodes} x {counts.pop()}" if len(counts) == 1 else "+".join(map(str, self.workers_per_node))

    def first(self, num_workers: int) -> Layout:
        """The layout of the first `num_workers` workers."""
        found: list[int] = []
        for size in self.workers_per_node:
            if left := num_workers - sum(found):
                found.append(min(size, left))
        return Layout(tuple(found))


@dataclass(frozen=True)
class Network:
    """Links inside a node and between nodes; all workers of a node share its link to the others."""

    inside: AlphaBeta
    between: AlphaBeta
    per_message_s: float = 0.0
    """Software overhead per message."""


@dataclass(frozen=True)
class StepForecast:
    """The forecast time of one training step, and its components."""

    total_s: float
    compute_s: float
    communication_s: float
    """Time of all communication, hidden or not."""
    exposed_s: float
    """Time of exposed communication, which compute does not hide."""
    overhead_s: float
    """Optimizer, launch overhead, waiting for the slowest worker."""
    bound_by: BoundBy
    low_s: float
    high_s: float
    """The 90 % prediction interval of a measured step."""
