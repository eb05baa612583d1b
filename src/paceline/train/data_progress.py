"""Where a run is in its data: which batch comes next, and whose samples are whose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.order import epoch_order
from paceline.errors import DataError
from paceline.parallel import Assignment
from paceline.spec import Job


@dataclass(frozen=True)
class Batch:
    """One global batch, and this worker's share of it."""

    epoch: int
    number: int
    """In its epoch."""
    samples: NDArray[np.int64]
    """The numbers of all its samples, whoever has them."""
    share: Assignment

    @property
    def own_samples(self) -> NDArray[np.int64]:
        """This worker's; one that has none takes the first sample of the batch as its stand-in."""
        return self.samples[slice(*self.share.span)] if self.share.sizes else self.samples[:1]


class DataProgress:
    """The way of a run through its epochs. One that is resumed goes on behind the last batch it was trained on."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self.num_samples: int | None = None
        """Of the training set."""
        self._epoch = 0
        """The epoch that the next batch belongs to."""
        self._next = 0
        """Its number in that epoch."""
        self._is_resumed = False
        """Whether the next batch is one that a checkpoint told, and the run has not come there yet."""

    def epochs(self) -> range:
        """The numbers of those that are not over."""
        return range(self._epoch if self._is_resumed else 0, self._job.epochs)

    def start(self, num_samples: int) -> None:
        """The training set has so many samples. Raises `DataError` where a run goes on with another number."""
        if self.num_samples not in (None, num_samples) and self._is_resumed:
            raise DataError(
                f"The training set has {num_samples:,} samples, but {self.num_samples:,} when this run was saved; "
                "resume with the same data, or begin in another folder."
            )
        self.num_samples = num_samples

    def enter(self, epoch: int, most: int | None) -> list[Batch]:
        """What is left of an epoch: at most so many batches, none of an epoch that was over before the run resumed."""
        assert self.num_samples is not None
        if (self._is_resumed and epoch < self._epoch) or (most is not None and most <= 0):
            return []
        if not (self._is_resumed and epoch == self._epoch):
            self._epoch, self._next = epoch, 0
        self._is_resumed = False
        return list(self._batches(most))

    def _batches(self, most: int | None) -> Iterator[Batch]:
        job = self._job
        assert self.num_samples is not None
        order = epoch_order(self.num_samples, job.global_batch_size, job.seed, self._epoch)
        stop = order.num_batches if most is None else min(order.num_batches, self._next + most)
        for number in range(self._next, stop):
            samples = order.batch(number)
            share = Assignment.of(len(samples), job.virtual_shards, self._rank, self._world_size)
            yield Batch(self._epoch, number, samples, share)

    def trained_on(self, batch: Batch) -> None:
        """It has been trained on."""
        self._epoch, self._next = batch.epoch, batch.number + 1

    @property
    def at_epoch_start(self) -> bool:
        """Whether no batch of the present epoch has been trained on."""
        return self._next == 0

    def leave_epoch(self) -> None:
        """Whatever followed the last batch of an epoch has been done too."""
        if self.num_samples is not None and self._next == -(-self.num_samples // self._job.global_batch_size):
            self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "next": self._next, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._next, self.num_samples = state["epoch"], state["next"], state["num_samples"]
        self._is_resumed = True
