"""The interface of lossy compressors: what a compressor is given, and what it has to leave in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Sum = Callable[[Tensor], None]
"""Adds a 1-D contiguous vector of one length over all workers, in place; any algorithm in any wire format."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are aggregated together.

    How parameters are put into buckets changes early in a run, so whatever must be remembered from step to step is
    remembered by a parameter's name.
    """

    values: Tensor
    """All gradients as one flat vector, float32 or float64."""
    parts: tuple[tuple[str, Tensor], ...]
    """Each parameter's name and its gradient in its own shape, a view of `values`."""


class Compressor(Protocol):
    """Sends less than the gradients. What it leaves out is added to the next step's gradients (error feedback)."""

    def aggregate(self, bucket: Bucket, total: Sum) -> None:
        """Replace the bucket's values by (about) their sum over all workers, bit for bit the same on each of them.

        If the sum is not finite, the step will be skipped: the bucket says so (it holds NaN or infinity on every
        worker) and what is owed stays as it was.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered from step to step, by parameter and kind."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...
