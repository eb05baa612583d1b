"""The most samples that go through the model together: as the plan says, or as many as memory has room for.

With "auto" a worker begins with its whole assignment. When a pass runs out of memory anywhere, all workers halve the
micro-batch and the step starts over, so that they agree and the failed attempt leaves no trace.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.errors import JobError
from paceline.parallel.assignment import Assignment
from paceline.spec import Job, Plan


class MicroBatchLimit:
    """The most samples of one forward pass; a whole number of virtual shards."""

    def __init__(self, plan: Plan, job: Job) -> None:
        given = plan.micro_batch_size
        self.is_automatic = given == "auto"
        self.size: int | None = given if isinstance(given, int) else None
        """None: all samples of a worker."""
        self._shard_size = job.shard_size

    def halve(self, assignment: Assignment) -> None:
        """Send half as many shards through the model at a time from now on; all workers do so."""
        most = max(stop - start for start, stop in assignment.shards_of_rank)
        num_shards = most if self.size is None else min(most, self.size // self._shard_size)
        self.size = max(1, num_shards // 2) * self._shard_size

    def shard_does_not_fit(self) -> str:
        """The sentence for a model that not even one virtual shard fits beside."""
        return (
            f"Memory ran out with one virtual shard of {self._shard_size} samples in the model, and a shard is never "
            "divided; raise virtual_shards (it is part of the job: the same for every worker count)."
        )


def check_automatic(job: Job, plan: Plan, world_size: int, *, may_skip: bool) -> None:
    """Raise `JobError` where micro_batch_size = "auto" cannot start a step over on all workers together.

    Args:
        may_skip: whether some parameters get no gradient in some steps.
    """
    why = ""
    if plan.micro_batch_size != "auto" or world_size == 1:
        return
    if plan.mesh is not None and not plan.mesh.is_plain:
        why = f"with the strategy {plan.mesh} workers wait for each other in the middle of a pass"
    elif job.norm == "sync":
        why = "with norm = 'sync' workers wait for each other in the middle of a pass"
    elif may_skip:
        why = "find_unused_parameters = True leaves open which gradients the other workers wait for"
    if why:
        raise JobError(
            f"micro_batch_size = 'auto' starts a step over when a worker runs out of memory, but {why}; give a number "
            "of samples."
        )


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out: a GPU's, or what this process may allocate."""
    words = str(problem)
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or (
        isinstance(problem, RuntimeError) and ("can't allocate memory" in words or "bad_alloc" in words)
    )


def free_memory(device: torch.device) -> None:
    """Let go of what a failed pass has left."""
    gc.collect()  # an error and the frames it came through refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def nothing_of(parameters: Iterable[Tensor]) -> Tensor:
    """A loss that depends on these parameters and has the gradient zero."""
    return torch.stack([parameter.reshape(-1)[:0].sum() for parameter in parameters]).sum()
