"""Check that all workers call the same collective.

Unchecked, a mix-up of calls with equal shapes gives a silently wrong result, and one with different shapes ends the
process without a Python error.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.errors import DivergenceError
from paceline.object_collectives import all_gather_objects
from paceline.words import and_more


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that one worker is about to call."""

    sequence: int
    step: int
    operation: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"call {self.sequence} in step {self.step}: {self.operation} of {self.name} ({shape} {self.dtype})"

    def fingerprint(self) -> list[int]:
        """Whole numbers, equal for equal calls and always as many."""
        text = f"{self.operation}|{self.name}|{self.dtype}|{self.shape}"
        return [self.sequence, self.step, zlib.crc32(text.encode())]


def check_agreement(call: CollectiveCall, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare `call` with what the other workers are about to do; one small all-gather.

    Raises:
        DivergenceError: on every worker, naming the ranks that differ, the tensor and the step.
    """
    mine = torch.tensor(call.fingerprint(), device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    if all(torch.equal(theirs, mine) for theirs in gathered):
        return
    raise DivergenceError(describe_divergence(all_gather_objects(call, group, [CollectiveCall])))


def describe_divergence(calls: Sequence[CollectiveCall]) -> str:
    """One sentence that names the ranks whose call differs from the most common one (in a tie, from rank 0's)."""
    counts = Counter(calls)
    common = max(counts, key=lambda call: (counts[call], call == calls[0]))
    differing = [rank for rank, call in enumerate(calls) if call != common]
    others = " and ".join(f"rank {rank} is at {calls[rank]}" for rank in differing[:4])
    more = and_more(len(differing) - 4)
    return (
        f"The workers are no longer doing the same: {others}{more}, while the other {counts[common]} are at {common}; "
        "look for code that depends on the rank, or on data of its own, before that step."
    )
