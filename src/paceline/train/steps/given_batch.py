"""What a script does to a batch between `run.batches` and `run.step`, as far as it shows there.

A worker has only its part of a batch. What is drawn for it there, such as noise or the partners of a mixup, falls to
other samples on another number of workers; in the loss function every virtual shard has random numbers of its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from paceline.containers import tensors, versions
from paceline.parallel.random_numbers.generators import generator_states

DRAWS_IN_LOOP = (
    "Between run.batches and run.step the script draws from torch's generator and changes the batch: which samples get "
    "which of these numbers depends on the number of workers, unless all share one. Draw in the loss function, where "
    "every virtual shard has its own, or in the data set."
)


class GivenBatch:
    """A batch as the script got it."""

    def __init__(self, content: Any) -> None:
        given = list(tensors(content))
        self._tensors = [weakref.ref(tensor) for tensor in given]
        self._versions = versions(given)
        self._device = next((tensor.device for tensor in given if tensor.is_cuda), torch.device("cpu"))
        self._torch_states = self._states()

    def is_changed_by_draws(self, content: Any) -> bool:
        """Whether `content`, which the script gives to `run.step`, is not what it got, and it has drawn in between."""
        now = list(tensors(content))
        is_same = (
            len(now) == len(self._tensors)
            and all(before() is one for before, one in zip(self._tensors, now, strict=True))
            and versions(now) == self._versions
        )
        return not is_same and self._states() != self._torch_states

    def _states(self) -> tuple[bytes, bytes]:
        """Of torch's generators alone: Python's and NumPy's mostly give one number for all samples."""
        _, on_host, on_device, _ = generator_states(self._device)
        return on_host, on_device
