"""Top-k: every worker chooses the largest values of its gradient, and what any of them chose is summed over all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.comm.compressor import Bucket, Compressor, Sum
from paceline.comm.links import Links


class TopK(Compressor):
    """Sends about k = ceil(density x values) values of a bucket, those that are largest on some worker.

    Each worker chooses the k largest values of gradient plus residual, by magnitude. The choices differ, so they go
    around the ring; then every worker contributes its value at *every* index that any worker chose. All send the same
    indices, so any algorithm in any wire format can compute the sum, all workers get the same bits, and values that a
    worker sends because another one chose them do not become part of its residual.

    With n workers a bucket costs each of them 4 (n - 1) k bytes of indices, and a sum over between k and n k values:
    k where the workers agree, n k where no two choose the same. At n x density near 1 this is no compression.
    """

    def __init__(self, density: float, links: Links) -> None:
        super().__init__()
        self._density = density
        self._links = links

    def aggregate(self, bucket: Bucket, total: Sum) -> None:
        values = bucket.values
        self.add_to(bucket.parts)
        k = math.ceil(self._density * values.numel())
        # NaN counts as larger than any number, so whoever has overflowed sends that, and the sum tells everybody.
        own = values.abs().topk(k, sorted=False).indices
        chosen = _union(own, values.numel(), self._links)
        vector = values[chosen]
        total(vector)
        self.settle(bucket, chosen, vector)


def _union(own: Tensor, num_values: int, links: Links) -> Tensor:
    """The indices that any worker has chosen, ascending; every worker brings as many."""
    is_chosen = torch.zeros(num_values, dtype=torch.bool, device=own.device)
    is_chosen[own] = True
    ring = links.ring
    place = ring.index(links.rank)
    message = own.to(torch.int32 if num_values < 2**31 else torch.int64)
    # Everybody passes on what came last: in ring order each choice enters and leaves a node once.
    for _ in range(len(ring) - 1):
        arriving = torch.empty_like(message)
        links.exchange({ring[(place + 1) % len(ring)]: message}, {ring[place - 1]: arriving}).wait()
        is_chosen[arriving.long()] = True
        message = arriving
    return is_chosen.nonzero().view(-1)
