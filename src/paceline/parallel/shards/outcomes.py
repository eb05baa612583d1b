"""Results of forward passes over virtual shards, and the exception that restarts a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.parallel.losses import ShardLoss


class StartOverError(Exception):
    """The passes of a step have to be made again, after `prepare`."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        super().__init__()
        self.prepare = prepare


@dataclass(frozen=True)
class ForwardPass:
    """The result of a forward pass."""

    loss: ShardLoss
    has_drawn: bool = False
    """Whether it drew random numbers or changed buffers, where that was not known before or several shards cannot."""
    is_unexamined: bool = False
    """Whether several shards drew random numbers in a way that was not examined."""


@dataclass
class Passed:
    """The results of this worker's passes in a step."""

    losses: Tensor | None = None
    """The sums of the worker's losses, 1-D; None if it has no sample, or not the last stage."""
    first_weight: float | Tensor = 0.0
    first_sqr: Tensor | None = None
    """The squared norm of the gradient of all workers' first passes, if gradient noise can be measured by it."""
    first_samples: int = 0
    """The number of samples that `first_sqr` is the gradient of."""

    def add(self, loss: ShardLoss) -> None:
        if self.losses is None:
            self.first_weight = loss.weight
        self.losses = loss.sums if self.losses is None else self.losses + loss.sums
