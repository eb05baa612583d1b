"""Summing gradients over all workers: an algorithm and a wire format, behind one scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.comm.links import FLOAT32, Links
from paceline.comm.parameter_server import sum_at_servers
from paceline.comm.scheduler import Scheduler

Algorithm = Callable[[Tensor, Links], None]
"""Sums a vector (1-D, contiguous, float32 or float64) over all workers, in place; called by all of them alike."""


@dataclass(frozen=True)
class Aggregator:
    """How the workers of one group add up. Every sum is begun at once and done in the background, in order."""

    algorithm: Algorithm
    links: Links
    scheduler: Scheduler

    def sum_bucket(self, values: Tensor, names: Sequence[str]) -> torch.futures.Future[Tensor]:
        """Begin to replace some parameters' gradients, as one flat vector, by their sum, in the run's wire format.

        Args:
            names: of the parameters.
        """
        ends = dict.fromkeys((names[0], names[-1]))
        return self.scheduler.submit("gradients", " … ".join(ends), values, lambda: self._sum_in_float(values))

    def sum_exactly(self, values: Tensor, name: str) -> torch.futures.Future[Tensor]:
        """Begin to sum a few numbers that no run may lose, 1-D: losses, statistics, counts."""
        links = replace(self.links, wire=FLOAT32)
        return self.scheduler.submit("numbers", name, values, lambda: all_reduce(values, links))

    def _sum_in_float(self, values: Tensor) -> None:
        """Sum low-precision gradients in float32, rounding once, at the end."""
        if values.dtype in (torch.float32, torch.float64):
            self.algorithm(values, self.links)
            return
        wide = values.float()
        self.algorithm(wide, self.links)
        values.copy_(wide)


def all_reduce(values: Tensor, links: Links) -> None:
    """The backend's own: one call, the reference that the other algorithms are tested against.

    The backend adds in the format that it is given. So values in a lossy format go by a reduce-scatter and an
    all-gather of direct messages, which add in the dtype of the values.
    """
    if links.wire.is_exact:
        links.all_reduce(values)
    else:
        sum_at_servers(values, links, workers=links.ring, servers=links.ring)
