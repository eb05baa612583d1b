"""Lossy compressors: a part of the gradient is sent, and the residual, which is not, is added to the next gradient.

With such error feedback, sending a part of the gradient converges like sending all of it (Stich, Cordonnier, Jaggi:
"Sparsified SGD with Memory", 2018; Karimireddy et al.: "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", 2019). That holds because nothing is lost: all that was sent so far, plus the residual, is the sum of all
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

RESIDUAL = "owed/"
"""The prefix of the key of a parameter's residual in a compressor's state; the parameter's name follows. It is part of
the format of checkpoints."""


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
    """Sums a part of the gradients, and keeps the rest as residuals, of a parameter's shape and dtype, always finite.

    Residuals differ from worker to worker. Only their sum over all workers matters to training, so that a run that
    continues with other workers may distribute it anew.
    """

    kept: tuple[str, ...] = (RESIDUAL,)
    """The prefixes of the keys of its state, which it keeps from step to step."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def aggregate(self, bucket: Bucket, total: Sum) -> None:
        """Replace the bucket's values by (about) their sum over all workers, bit for bit the same on each of them.

        If the sum is not finite, the step will be skipped: the bucket says so (it holds NaN or infinity on every
        worker) and the residuals stay as they were.
        """
        raise NotImplementedError

    def add_to(self, parts: Iterable[tuple[str, Tensor]]) -> None:
        """Add to each named gradient its residual, in place."""
        for name, part in parts:
            if RESIDUAL + name in self._state:
                # `to` moves a residual that was loaded from a file; otherwise it does nothing.
                residual = self._state[RESIDUAL + name] = self._state[RESIDUAL + name].to(part)
                part.add_(residual)

    def remember(self, name: str, left_out: Tensor, poison: Tensor) -> None:
        """Set the residual of parameter `name` to `left_out`, unless `poison` is NaN; else it must be 0."""
        residual = self._state.setdefault(RESIDUAL + name, torch.zeros_like(left_out))
        torch.where(poison == 0, left_out, residual, out=residual)

    def settle(self, bucket: Bucket, chosen: Tensor, sums: Tensor) -> None:
        """Store what was not sent as residuals, and write the sums of what was sent into the bucket, zero elsewhere.

        Args:
            chosen: the indices of the values that were sent.
            sums: the sums of these over all workers; more numbers may follow, which only have to be finite.
        """
        values, poison = bucket.values, nan_if_not_finite(sums)
        values[chosen] = 0.0
        for name, part in bucket.parts:
            self.remember(name, part, poison)
        values.zero_()
        values[chosen] = sums[: len(chosen)]
        values.add_(poison)

    def state_dict(self) -> dict[str, Tensor]:
        """The state that is kept from step to step, by kind and parameter."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state = {key: value.detach().clone() for key, value in state.items() if key.startswith(self.kept)}


def nan_if_not_finite(values: Tensor) -> Tensor:
    """A scalar that is 0, or NaN if any value is NaN or infinite; on the device of `values`, without waiting for it."""
    return torch.linalg.vector_norm(values, math.inf) * 0 if values.numel() else values.new_zeros(())


def shared_generator(*key: int | str) -> torch.Generator:
    """A fresh generator that depends on its key alone; on the CPU, so that workers on any device draw the same."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
