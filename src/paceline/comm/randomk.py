"""Random-k: all workers send the same values, chosen at random by a shared seed, so without their indices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.comm.compressor import RESIDUAL, Bucket, Compressor, Sum, nan_if_not_finite, shared_generator
from paceline.containers import on_device

_DRAWS = "draws/"
"""The number of draws from a bucket, by the name of its first parameter."""


class RandomK(Compressor):
    """Sends k = ceil(density x values) values of a bucket, and one that tells whether a worker has overflowed.

    What is chosen is the same on all workers, and what is sent is linear in the gradients, so that but for rounding the
    result does not depend on how many workers there are.

    Values are sent as they are, not multiplied by 1 / density. That would make each step's sum right on average, but
    the residual is sent later: it would be counted twice, and grow instead of staying bounded (Stich et al. 2018,
    Karimireddy et al. 2019; both in `compressor`).
    """

    kept = (RESIDUAL, _DRAWS)

    def __init__(self, density: float, seed: int) -> None:
        super().__init__()
        self._density = density
        self._seed = seed

    def aggregate(self, bucket: Bucket, total: Sum) -> None:
        values = bucket.values
        self.add_to(bucket.parts)
        chosen = on_device(self._draw(bucket.parts[0][0], values.numel()), values.device)
        # A value that is not finite may not have been chosen, but all workers have to know of it.
        vector = torch.cat([values[chosen], nan_if_not_finite(values).view(1)])
        total(vector)
        self.settle(bucket, chosen, vector)

    def _draw(self, name: str, num_values: int) -> Tensor:
        """k indices, ascending: the values are cut into k runs as even as can be, and each run sends one of its own.

        Every value has the same chance (but for the runs' lengths, which differ by one at most), as in a draw of k out
        of all, which is what the proofs need; but nothing as long as the bucket has to be drawn or permuted.
        """
        number = int(self._state.get(_DRAWS + name, 0))
        self._state[_DRAWS + name] = torch.tensor(number + 1)
        k = math.ceil(self._density * num_values)
        ends = torch.arange(k + 1) * num_values // max(k, 1)
        lots = torch.rand(k, generator=shared_generator(self._seed, number, name), dtype=torch.float64)
        return ends[:-1] + (lots * ends.diff()).long()
