"""What all workers must have alike, compared before they train on it, or go on with it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.errors import DataError, DivergenceError
from paceline.object_collectives import all_gather_objects


def check_same_order(digest: str, epoch: int | None, group: dist.ProcessGroup | None) -> None:
    """A collective at the beginning of every epoch and evaluation.

    Args:
        digest: the fingerprint of the order of samples on this worker.
        epoch: None: of an evaluation.

    Raises:
        DataError: on all workers, if workers have orders that differ.
    """
    digests = all_gather_objects(digest, group)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        where = "the evaluation" if epoch is None else f"epoch {epoch}"
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        raise DataError(
            f"In {where} {ranks} would read other samples than rank 0, or in another order; build the data set and the "
            "sampler alike on all workers, and draw from torch's, NumPy's or random's global generator only."
        )


def check_same_state(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None, *, holds_all: bool
) -> None:
    """A collective after what may have changed weights or learning rates on one worker only.

    Args:
        holds_all: whether every worker holds all weights, so that sums of them are alike where they are.

    Raises:
        DivergenceError: on all workers, if these differ.
    """
    parameters = [parameter.detach() for parameter in model.parameters()] if holds_all else []
    sums = [torch.stack([one.double().sum(), one.double().square().sum()]) for one in parameters]
    weights = torch.stack(sums).flatten().tolist() if sums else []
    rates = [float(one["lr"]) for one in optimizer.param_groups]
    states = all_gather_objects([repr(weights), repr(rates)], group)
    for rank, state in enumerate(states):
        for what, mine, theirs in zip(("weights", "learning rates"), states[0], state, strict=True):
            if mine != theirs:
                raise DivergenceError(
                    f"Worker {rank} has other {what} than rank 0: something, such as a callback, changed them on some "
                    "workers only; do the same on every worker."
                )
