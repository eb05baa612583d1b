"""Gradient aggregation: every algorithm is a DDP communication hook with one signature.

    hook(state: HookState, bucket: GradBucket) -> Future[Tensor]

The future holds the *sum* of the bucket over all workers; the mean over samples is in the loss weights already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.comm.all_reduce import all_reduce
from paceline.comm.state import HookState
from paceline.comm.tree_exact import tree_exact

CommHook = Callable[[HookState, GradBucket], torch.futures.Future[torch.Tensor]]

ALGORITHMS: dict[str, CommHook] = {
    "all_reduce": all_reduce,
    "tree_exact": tree_exact,
}

__all__ = ["ALGORITHMS", "CommHook", "HookState", "all_reduce", "tree_exact"]
