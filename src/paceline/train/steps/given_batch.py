"""What a script does to a batch between `run.batches` and `run.step`, as far as it shows there.

A worker has only its part of a batch. What is drawn for it there, such as noise or the partners of a mixup, falls to
other samples on another number of workers; in the loss function every virtual shard has random numbers of its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.containers import named_tensors, tensors, versions
from paceline.parallel.random_numbers.generators import generator_states
from paceline.sharded_batch import ShardedBatch
from paceline.train.steps.batch_recording import BatchRecording

DRAWS_IN_LOOP = (
    "Between run.batches and run.step the script draws from torch's generator and changes the batch: which samples get "
    "which of these numbers depends on the number of workers, unless all share one. Draw in the loss function, where "
    "every virtual shard has its own, or in the data set."
)
MIXES_SAMPLES = (
    "Between run.batches and run.step the script makes {} of several samples of the batch, as by a permutation, "
    "flip(0) or a mean over all of them. A worker has only its part of the batch there, so the result depends on the "
    "number of workers. Do it in the loss function, which gets one virtual shard after the other where samples are "
    "mixed, in the data set or in collate_fn."
)


class GivenBatch:
    """A batch as the script got it, and what it has done to it since."""

    def __init__(self, content: Any, num_samples: int, *, is_recorded: bool = False) -> None:
        """
        Args:
            num_samples: this worker's.
            is_recorded: whether to find out if the script mixes samples, until `stop`.
        """
        given = list(tensors(content))
        self._tensors = [weakref.ref(tensor) for tensor in given]
        self._versions = versions(given)
        self._device = next((tensor.device for tensor in given if tensor.is_cuda), torch.device("cpu"))
        self._torch_states = self._states()
        self._num_samples = num_samples
        # Another mode of the script's may end before this one; and shards that were collated alone stay apart.
        is_recorded &= _get_current_dispatch_mode() is None and not isinstance(content, ShardedBatch)
        self._recording = BatchRecording(given) if is_recorded else None

    def stop(self) -> None:
        """Look at nothing more that the script does."""
        if self._recording is not None:
            self._recording.stop()

    def mixed(self, content: Any) -> str:
        """Where in `content`, which the script gives to `run.step`, a sample follows from others of this worker's
        batch; empty if none is known to."""
        if self._recording is None:
            return ""
        named = list(named_tensors(content, "batch")) if self._is_changed(content) else []
        mixed = self._recording.mixes_samples([tensor for _, tensor in named], self._num_samples)
        self._recording.forget()
        return next((place for (place, _), is_mixed in zip(named, mixed, strict=True) if is_mixed), "")

    def is_changed_by_draws(self, content: Any) -> bool:
        """Whether `content`, which the script gives to `run.step`, is not what it got, and it has drawn in between."""
        return self._is_changed(content) and self._states() != self._torch_states

    def _is_changed(self, content: Any) -> bool:
        now = list(tensors(content))
        return not (
            len(now) == len(self._tensors)
            and all(before() is one for before, one in zip(self._tensors, now, strict=True))
            and versions(now) == self._versions
        )

    def _states(self) -> tuple[bytes, bytes]:
        """Of torch's generators alone: Python's and NumPy's mostly give one number for all samples."""
        _, on_host, on_device, _ = generator_states(self._device)
        return on_host, on_device
