"""What all workers must have alike, compared before they train on it."""

from __future__ import annotations

import torch.distributed as dist

from paceline.errors import DataError
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
