"""The communication hook of DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.aggregator import Aggregator
from paceline.comm.compressor import Bucket


def _ignore() -> None:
    return None


@dataclass
class HookState:
    """The aggregator, the names of the gradients, and a callback for the last bucket of a backward pass."""

    aggregator: Aggregator
    names: Mapping[Tensor, str]
    """The name of every trained parameter."""
    on_last_bucket: Callable[[], None] = _ignore
    idle: bool = False
    """Set where this worker's gradients come from a stand-in and must count for nothing."""


def aggregate(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: a future of the bucket's *sum* over all workers, in flight while backward goes on.

    The mean over samples is in the loss weights already.
    """
    if bucket.is_last():
        state.on_last_bucket()
    values = bucket.buffer()
    if state.idle:
        # Not by a loss of weight zero alone: zero times a stand-in's overflow would be NaN for everybody.
        values.zero_()
    names = [state.names[parameter] for parameter in bucket.parameters()]
    return state.aggregator.sum_bucket(Bucket(values, tuple(zip(names, bucket.gradients(), strict=True))))
