"""Error feedback: what lossy compression leaves out of a step is added to the next step's gradient.

With it, sending a part of the gradient converges like sending all of it (Stich, Cordonnier, Jaggi: "Sparsified SGD with
Memory", 2018; Karimireddy et al.: "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019). That
holds because nothing disappears: what was sent so far plus what is owed is the sum of all gradients so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.comm.compressor import Bucket

OWED = "owed/"
"""The prefix of these keys in a compressor's state; the parameter's name follows."""


class ErrorFeedback:
    """What a compressor owes: the residual of this worker, in each parameter's own shape and dtype; always finite.

    It differs from worker to worker. Only its sum over all workers matters to training, so that a run that goes on
    with other workers may hand it out anew as long as the sum stays.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}

    def add_to(self, parts: Iterable[tuple[str, Tensor]]) -> None:
        """Add to each named gradient what is owed to it, in place."""
        for name, part in parts:
            if name in self._by_name:
                # `to` moves what was loaded from a file; otherwise it does nothing.
                self._by_name[name] = self._by_name[name].to(part)
                part.add_(self._by_name[name])

    def remember(self, name: str, left_out: Tensor) -> None:
        """From now on this, and no more, is owed to parameter `name`."""
        if name in self._by_name:
            self._by_name[name].copy_(left_out)
        else:
            self._by_name[name] = left_out.clone()

    def settle(self, bucket: Bucket, chosen: Tensor, sums: Tensor) -> None:
        """Leave in the bucket the sums of what was sent, and zero elsewhere; owe what was not sent.

        If a sum is not finite, the bucket becomes NaN and what is owed stays as it was.

        Args:
            chosen: the indices of the values that were sent.
            sums: theirs over all workers; more numbers may follow, which only have to be finite.
        """
        values = bucket.values
        if not is_finite(sums):
            values.fill_(torch.nan)
            return
        values[chosen] = 0.0
        for name, part in bucket.parts:
            self.remember(name, part)
        values.zero_()
        values[chosen] = sums[: len(chosen)]

    def state_dict(self) -> dict[str, Tensor]:
        return {OWED + name: owed for name, owed in self._by_name.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._by_name = {
            key.removeprefix(OWED): owed.detach().clone() for key, owed in state.items() if key.startswith(OWED)
        }


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass, no copy."""
    return not values.numel() or math.isfinite(float(torch.linalg.vector_norm(values, math.inf)))
