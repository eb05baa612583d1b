"""What a communication hook knows besides its bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]


def _ignore() -> None:
    return None


@dataclass
class HookState:
    """The group to aggregate over, and who wants to know when backward has produced its last gradient."""

    group: dist.ProcessGroup
    on_last_bucket: Callable[[], None] = _ignore
    idle: bool = False
    """Set where this worker's gradients come from a stand-in and must count for nothing."""

    def contribution(self, bucket: GradBucket) -> Tensor:
        """What this worker adds to the sum: the bucket's own buffer."""
        if bucket.is_last():
            self.on_last_bucket()
        # Not by a loss of weight zero alone: zero times a stand-in's overflow would be NaN for everybody.
        return bucket.buffer().zero_() if self.idle else bucket.buffer()
