"""The backend's own all-reduce: the oracle of the other algorithms."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.state import HookState


def all_reduce(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum the bucket over all workers; in flight while backward goes on."""
    work = dist.all_reduce(state.contribution(bucket), group=state.group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
