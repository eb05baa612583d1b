"""Summing gradients over all workers: an algorithm, a wire format and perhaps a compressor, behind one scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.comm.all_reduce import all_reduce
from paceline.comm.compressor import Bucket, Compressor
from paceline.comm.links import Links
from paceline.comm.scheduler import Scheduler
from paceline.comm.wire import FLOAT32

Algorithm = Callable[[Tensor, Links], None]
"""Sums a vector (1-D, contiguous, float32 or float64) over all workers, in place; called by all of them alike."""


@dataclass(frozen=True)
class Aggregator:
    """How the workers of one group add up. Every sum is begun at once and done in the background, in order."""

    algorithm: Algorithm
    links: Links
    scheduler: Scheduler
    compressor: Compressor | None = None

    def sum_bucket(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Begin to replace the bucket's values by their sum, in the run's wire format."""
        names = dict.fromkeys((bucket.parts[0][0], bucket.parts[-1][0]))
        return self.scheduler.submit(
            "gradients", " … ".join(names), bucket.values, lambda: self._in_float(bucket, self._sum_bucket)
        )

    def sum_exactly(self, values: Tensor, name: str) -> torch.futures.Future[Tensor]:
        """Begin to sum a few numbers that no run may lose, 1-D: losses, statistics, counts."""
        links = replace(self.links, wire=FLOAT32)
        return self.scheduler.submit("numbers", name, values, lambda: all_reduce(values, links))

    def sum_now(self, values: Tensor, name: str) -> None:
        """Sum a few numbers, 1-D, in place, as `sum_exactly` does, and wait for the sum."""
        self.sum_exactly(values, name).wait()
        self.scheduler.raise_error()

    def _sum_bucket(self, bucket: Bucket) -> None:
        if self.compressor is None:
            self._total(bucket.values)
        else:
            self.compressor.aggregate(bucket, self._total)

    def _total(self, values: Tensor) -> None:
        self.algorithm(values, self.links)

    @staticmethod
    def _in_float(bucket: Bucket, aggregate: Callable[[Bucket], None]) -> None:
        """Sum low-precision gradients in float32, rounding once, at the end."""
        if bucket.values.dtype in (torch.float32, torch.float64):
            aggregate(bucket)
            return
        wide = bucket.values.float()
        pieces = wide.split([part.numel() for _, part in bucket.parts])
        parts = tuple(
            (name, piece.as_strided(part.shape, part.stride(), piece.storage_offset()))
            for (name, part), piece in zip(bucket.parts, pieces, strict=True)
        )
        aggregate(Bucket(wide, parts))
        bucket.values.copy_(wide)
