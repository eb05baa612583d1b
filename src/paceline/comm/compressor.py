"""Lossy compressors: less is sent than the gradients, and what is left out is added to the next step's gradient.

With such error feedback, sending a part of the gradient converges like sending all of it (Stich, Cordonnier, Jaggi:
"Sparsified SGD with Memory", 2018; Karimireddy et al.: "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", 2019). That holds because nothing disappears: what was sent so far plus what is owed is the sum of all
gradients so far.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Sum = Callable[[Tensor], None]
"""Adds a 1-D contiguous vector of one length over all workers, in place; any algorithm in any wire format."""

OWED = "owed/"
"""How the key of what is owed to a parameter begins in a compressor's state; the parameter's name follows."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are aggregated together.

    How parameters are put into buckets changes early in a run, so what a compressor keeps from step to step is kept by
    the name of a parameter.
    """

    values: Tensor
    """All gradients as one flat vector, float32 or float64."""
    parts: tuple[tuple[str, Tensor], ...]
    """Each parameter's name and its gradient in its own shape, a view of `values`."""


class Compressor:
    """Sums less than the gradients, and owes the rest: in each parameter's own shape and dtype, always finite.

    What is owed differs from worker to worker. Only its sum over all workers matters to training, so that a run that
    goes on with other workers may hand it out anew as long as the sum stays.
    """

    kept: tuple[str, ...] = (OWED,)
    """What is remembered from step to step, as the beginnings of the keys of its state."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def aggregate(self, bucket: Bucket, total: Sum) -> None:
        """Replace the bucket's values by (about) their sum over all workers, bit for bit the same on each of them.

        If the sum is not finite, the step will be skipped: the bucket says so (it holds NaN or infinity on every
        worker) and what is owed stays as it was.
        """
        raise NotImplementedError

    def add_to(self, parts: Iterable[tuple[str, Tensor]]) -> None:
        """Add to each named gradient what is owed to it, in place."""
        for name, part in parts:
            if OWED + name in self._state:
                # `to` moves what was loaded from a file; otherwise it does nothing.
                owed = self._state[OWED + name] = self._state[OWED + name].to(part)
                part.add_(owed)

    def remember(self, name: str, left_out: Tensor, poison: Tensor) -> None:
        """From now on this, and no more, is owed to parameter `name`, unless `poison` is NaN."""
        owed = self._state.setdefault(OWED + name, torch.zeros_like(left_out))
        torch.where(poison == 0, left_out, owed, out=owed)

    def settle(self, bucket: Bucket, chosen: Tensor, sums: Tensor) -> None:
        """Leave in the bucket the sums of what was sent, and zero elsewhere; owe what was not sent.

        Args:
            chosen: the indices of the values that were sent.
            sums: theirs over all workers; more numbers may follow, which only have to be finite.
        """
        values, poison = bucket.values, poison_of(sums)
        values[chosen] = 0.0
        for name, part in bucket.parts:
            self.remember(name, part, poison)
        values.zero_()
        values[chosen] = sums[: len(chosen)]
        values.add_(poison)

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered from step to step, by parameter and kind."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state = {key: value.detach().clone() for key, value in state.items() if key.startswith(self.kept)}


def poison_of(values: Tensor) -> Tensor:
    """A scalar that is 0, or NaN if any value is NaN or infinite. On its device: to read it would be to wait for it."""
    return torch.linalg.vector_norm(values, math.inf) * 0 if values.numel() else values.new_zeros(())


def shared_generator(*key: int | str) -> torch.Generator:
    """A fresh generator that depends on its key alone; on the CPU, so that workers on any device draw the same."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
