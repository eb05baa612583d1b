"""The position of a run in its data: the next global batch, and the assignment of its samples to workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.order import EpochOrder, epoch_order
from paceline.errors import DataError
from paceline.parallel import Assignment
from paceline.spec import Job


@dataclass(frozen=True)
class Batch:
    """One global batch, and this worker's assignment of it."""

    epoch: int
    number: int
    """In its epoch."""
    index: int
    """The number of the batch counted from the beginning of the job, over all epochs."""
    num_left: int
    """How many batches this run trains on until the epoch ends, including this one."""
    samples: NDArray[np.int64]
    """The numbers of the samples of all workers."""
    assignment: Assignment
    samples_per_epoch: int

    @property
    def own_samples(self) -> NDArray[np.int64]:
        """The numbers of this worker's samples; without any, the first sample of the batch as a stand-in."""
        return self.samples[slice(*self.assignment.span)] if self.assignment.sizes else self.samples[:1]


class DataProgress:
    """The progress of a run through its epochs. A resumed run continues after its last trained batch."""

    def __init__(self, job: Job, rank: int, num_assignments: int, max_steps: int | None = None) -> None:
        """
        Args:
            rank: the index of this worker among the `num_assignments` of a global batch.
            max_steps: the maximum number of updates.
        """
        self.steps = 0
        """Optimizer updates made."""
        self.samples_seen = 0
        self._job = job
        self._rank = rank
        self._num_assignments = num_assignments
        self._max_steps = max_steps
        self._num_samples: int | None = None
        self._epoch = 0
        """The epoch that the next batch belongs to."""
        self._next = 0
        """The number of the next batch in its epoch."""
        self._is_resumed = False
        """Whether the position comes from a checkpoint, and the run has not reached it yet."""
        self._order: tuple[int, EpochOrder] | None = None
        """The most recently used epoch, and its order."""

    def total_steps(self, num_samples: int) -> int:
        """Updates of the whole run on a training set of `num_samples`."""
        steps = self._job.epochs * self._batches_per_epoch(num_samples)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def epochs(self) -> range:
        """The numbers of the remaining epochs."""
        return range(self._epoch if self._is_resumed else 0, self._job.epochs)

    def enter(self, epoch: int, num_samples: int) -> list[Batch]:
        """The remaining batches of an epoch; none if it had ended before the run resumed.

        Raises:
            DataError: a resumed run had a training set of another size than `num_samples`.
        """
        if self._num_samples not in (None, num_samples) and self._is_resumed:
            raise DataError(
                f"The training set has {num_samples:,} samples, but {self._num_samples:,} when this run was saved; "
                "resume with the same data, or begin in another folder."
            )
        self._num_samples = num_samples
        most = None if self._max_steps is None else self._max_steps - self.steps
        if (self._is_resumed and epoch < self._epoch) or (most is not None and most <= 0):
            return []
        if not (self._is_resumed and epoch == self._epoch):
            self._epoch, self._next = epoch, 0
        self._is_resumed = False
        num_batches = self._batches_per_epoch(num_samples)
        stop = num_batches if most is None else min(num_batches, self._next + most)
        return [self._batch(number, stop - number) for number in range(self._next, stop)]

    def _batch(self, number: int, num_left: int) -> Batch:
        assert self._num_samples is not None
        index = self._epoch * self._batches_per_epoch(self._num_samples) + number
        samples = self.samples(index)
        job = self._job
        assignment = Assignment.of(len(samples), job.virtual_shards, self._rank, self._num_assignments)
        return Batch(self._epoch, number, index, num_left, samples, assignment, self._num_samples)

    def place(self, index: int) -> tuple[int, int]:
        """The epoch of a global batch and its number in it, by its number in the job."""
        assert self._num_samples is not None
        return divmod(index, self._batches_per_epoch(self._num_samples))

    def samples(self, index: int) -> NDArray[np.int64]:
        """The numbers of the samples of a global batch, by its number in the job."""
        assert self._num_samples is not None
        epoch, number = self.place(index)
        order = self._order  # asynchronous servers ask from threads of their own
        if order is None or order[0] != epoch:
            order = epoch, epoch_order(self._num_samples, self._job.global_batch_size, self._job.seed, epoch)
            self._order = order
        return order[1].batch(number)

    def _batches_per_epoch(self, num_samples: int) -> int:
        return -(-num_samples // self._job.global_batch_size)

    def trained_on(self, batch: Batch) -> None:
        """Note that an update by `batch` has been made, by this worker or a server."""
        self.steps += 1
        self.samples_seen += batch.assignment.global_size
        self._epoch, self._next = batch.epoch, batch.number + 1

    @property
    def at_epoch_start(self) -> bool:
        """Whether no batch of the current epoch has been trained on."""
        return self._next == 0

    def leave_epoch(self) -> None:
        """Note that the epoch is complete, including its evaluation, if all its batches have been trained on."""
        if self._num_samples is not None and self._next == self._batches_per_epoch(self._num_samples):
            self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        course = {"epoch": self._epoch, "next": self._next, "num_samples": self._num_samples}
        return {"steps": self.steps, "samples_seen": self.samples_seen, "course": course}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.samples_seen = state["steps"], state["samples_seen"]
        course = state["course"]
        self._epoch, self._next, self._num_samples = course["epoch"], course["next"], course["num_samples"]
        self._is_resumed = True
