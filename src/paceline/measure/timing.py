"""The slowest worker's number, for all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.process_groups import device_of


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest of the workers' numbers, for all of them; a collective, so who gets it knows that all came here."""
    if group is None:
        return float(value)
    values = torch.tensor([value], dtype=torch.float64, device=device_of(group))
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return float(values)
