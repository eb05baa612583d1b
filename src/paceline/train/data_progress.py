"""The position of a run in its data: the next global batch, and the assignment of its samples to workers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.order import EpochOrder
from paceline.data.streams import StreamPosition
from paceline.errors import DataError, JobError
from paceline.parallel import Assignment
from paceline.parallel.assignment import shards_of_rank
from paceline.spec import Job

Orders = Callable[[int], EpochOrder]
"""The order of every epoch, by its number."""


@dataclass(frozen=True)
class GlobalBatch:
    """One global batch, and this worker's assignment of it."""

    epoch: int
    number: int
    """Index of the batch within its epoch, from 0."""
    index: int
    """Index of the batch over all epochs of the job, from 0."""
    num_left: int
    """How many batches this run trains on until the epoch ends, including this one."""
    samples: NDArray[np.int64]
    """The numbers of the samples of all workers."""
    assignment: Assignment
    samples_per_epoch: int
    position: StreamPosition | None = None
    """How far the stream has been read after this batch, if it is of a stream."""

    @property
    def own_shards(self) -> tuple[NDArray[np.int64], ...]:
        """The indices of the samples of each of this worker's shards, 1-D; if it has none, the batch's first sample."""
        ends = itertools.accumulate(self.assignment.sizes, initial=self.assignment.span[0])
        return tuple(self.samples[start:stop] for start, stop in itertools.pairwise(ends)) or (self.samples[:1],)


class DataProgress:
    """The progress of a run through its epochs. A resumed run continues after its last trained batch.

    Attributes:
        steps: optimizer updates made.
        samples_seen: by these updates, over all workers.
        epoch: the epoch that the last batch belongs to; the next one once that is left.
        digest: the fingerprint of this epoch's order, once it is entered.
        gather: returns the values of all workers, while a stream is trained on; a collective.
    """

    def __init__(self, job: Job, rank: int, num_assignments: int, max_steps: int | None = None) -> None:
        """
        Args:
            rank: the index of this worker among the `num_assignments` of a global batch.
            max_steps: the maximum number of updates.
        """
        self.steps, self.samples_seen, self.epoch = 0, 0, 0
        self.digest: str | None = None
        self.gather: Callable[[Any], list[Any]] = lambda value: [value]
        self.job, self._rank, self._num_assignments = job, rank, num_assignments
        self._max_steps = max_steps
        self._end = max_steps
        """The number of updates after which the run ends: `max_steps`, or fewer once it has been stopped."""
        self._set_size: int | None = None
        """The number of samples in the training set; None: of a stream, or not known yet."""
        self._next = 0
        """The number of the next batch in its epoch."""
        self._checks_order = True
        self._is_resumed = False
        """Whether the position comes from a checkpoint, and the run has not reached it yet."""
        self._orders: Orders | None = None
        """Returns the order of an epoch; the one used last is cached. None: a stream has none."""
        self._position: StreamPosition | None = None
        """How far the stream of this epoch has been trained on; its states are those that this worker knows."""
        self._has_ended = False
        """Whether the stream of this epoch is known to have ended."""
        self._told_steps: dict[int, int] = {}
        """What `total_steps` first told the script, by the number of samples."""
        self._told_before: dict[int, int] = {}
        """The `_told_steps` of the checkpoint, which must not change after a resume."""

    # --- the whole run ---

    def total_steps(self, num_samples: int) -> int:
        """Updates of the whole run on a training set of `num_samples`, in batches of the job's size. Raises `JobError`
        for before the run was saved the number was another one, from which the script may have built a learning-rate
        schedule."""
        steps = self.job.epochs * -(-num_samples // self.job.global_batch_size)
        steps = steps if self._max_steps is None else min(steps, self._max_steps)
        self._told_steps.setdefault(num_samples, steps)
        self._check_told_steps()
        return steps

    def _check_told_steps(self) -> None:
        for num_samples, now in self._told_steps.items():
            before = self._told_before.get(num_samples, now)
            if now != before:
                raise JobError(
                    f"run.total_steps({num_samples}) is {now:,}, and was {before:,} when this run was saved, so a "
                    "schedule of learning rates that is made of it would be another one. Set epochs and max_steps as "
                    "they were, or make the schedule of a number of your own; with force = True the run goes on so."
                )

    @property
    def last_step(self) -> int | None:
        """The number of the run's last step, if all epochs are as long as this one; None: not known, of a stream."""
        if self._orders is None:
            return self._end
        steps = self.job.epochs * self._orders(self.epoch).num_batches
        return steps if self._end is None else min(steps, self._end)

    @property
    def steps_left(self) -> int | None:
        """How many updates the run may still make; None: any number."""
        return None if self._end is None else max(0, self._end - self.steps)

    def end_here(self) -> None:
        """Make no more updates."""
        self._end = self.steps

    # --- epochs ---

    def epochs(self) -> range:
        """The numbers of the remaining epochs."""
        return range(self.epoch if self._is_resumed else 0, self.job.epochs)

    def is_over(self, epoch: int) -> bool:
        """Whether no batch of an epoch is left: it had ended before the run resumed, or all steps have been made."""
        return (self._is_resumed and epoch < self.epoch) or self.steps_left == 0

    def enter(self, epoch: int, orders: Orders, set_size: int) -> range:
        """The numbers of the remaining batches of an epoch that is not over; `batch` makes them.

        Args:
            set_size: the number of samples in the training set.

        Raises:
            DataError: a resumed run had a training set of another size, or another order of samples in the epoch in
                whose middle it was saved.
        """
        self._orders, self._position = functools.lru_cache(1)(orders), None
        order = self.order(epoch)
        self._begin(epoch, order.digest(), set_size)
        left = order.num_batches if self.steps_left is None else self._next + self.steps_left
        return range(self._next, min(order.num_batches, left))

    def enter_stream(self, epoch: int, digest: str) -> StreamPosition:
        """Where to begin in an epoch of a stream that is not over; `stream_batch` makes its batches.

        Args:
            digest: a fingerprint of how the stream is divided.

        Raises:
            DataError: a resumed run had another stream in the epoch in whose middle it was saved.
        """
        self._orders = None
        self._begin(epoch, digest, None)
        if self._next == 0 or self._position is None:
            self._position = StreamPosition(0, (0,) * self.job.virtual_shards)
        return self._position

    def _begin(self, epoch: int, digest: str, set_size: int | None) -> None:
        """Go to the beginning of an epoch, or to the place in it where the run was saved."""
        if self._is_resumed and self._set_size not in (None, set_size):
            now = "no length" if set_size is None else f"{set_size:,} samples"
            raise DataError(
                f"The training set has {now}, but {self._set_size:,} samples when this run was saved; resume with the "
                "same data, or begin in another folder."
            )
        if not (self._is_resumed and epoch == self.epoch):
            self.epoch, self._next = epoch, 0
        elif self._next > 0 and self._checks_order and digest != self.digest:
            raise DataError(
                f"The samples of epoch {epoch} come in another order than when this run was saved in the middle of it; "
                "give the same data and a sampler that depends on the epoch alone (set_epoch, or torch's own "
                "generators)."
            )
        self._set_size, self.digest = set_size, digest
        self._is_resumed = self._has_ended = False

    def end_stream(self) -> None:
        """Note that all batches of the epoch have been trained on."""
        self._has_ended = True

    @property
    def at_epoch_start(self) -> bool:
        """Whether no batch of the current epoch has been trained on."""
        return self._next == 0

    @property
    def epochs_done(self) -> int | None:
        """How many epochs have been trained on; None in the middle of one."""
        if self._next == 0 and not self._has_ended:
            return self.epoch  # maybe none that comes: a sampler need not know its order
        is_complete = self._has_ended if self._orders is None else self._next == self._orders(self.epoch).num_batches
        return self.epoch + 1 if is_complete else None

    def leave_epoch(self) -> None:
        """Note that the epoch is complete, including its evaluation, if all its batches have been trained on."""
        if self.epochs_done is not None:
            self.epoch, self._next, self._position, self._has_ended = self.epochs_done, 0, None, False

    # --- batches ---

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch of a map-style set, once the first one is entered."""
        assert self._orders is not None
        return self._orders(epoch)

    def batch(self, number: int, stop: int) -> GlobalBatch:
        """A batch of the current epoch, of which those before `stop` are trained on."""
        order = self.order(self.epoch)
        index = self.epoch * order.num_batches + number
        samples = order.batch(number)
        assignment = Assignment.of(len(samples), self.job.virtual_shards, self._rank, self._num_assignments)
        return GlobalBatch(self.epoch, number, index, stop - number, samples, assignment, order.num_samples)

    @property
    def own_substreams(self) -> range:
        """The numbers of the substreams that this worker reads."""
        return range(*shards_of_rank(self._rank, self._num_assignments, self.job.virtual_shards))

    def stream_batch(
        self, sizes: Sequence[int], states: Mapping[str, Any], fingerprint: int, samples_per_epoch: int
    ) -> GlobalBatch:
        """The next batch of a stream.

        Args:
            sizes: how many samples each substream gives.
            states: the stream's own states after it, as far as this worker knows them.
            fingerprint: the fingerprint of the stream's samples so far; 0: not known.
        """
        position = self._position
        assert position is not None  # `enter_stream` was called
        assignment = Assignment.of_sizes(sizes, self.job.virtual_shards, self._rank, self._num_assignments)
        before = sum(position.taken)
        taken = tuple(had + more for had, more in zip(position.taken, sizes, strict=True))
        after = StreamPosition(position.step + 1, taken, states, fingerprint)
        samples = np.arange(before, before + sum(sizes))
        return GlobalBatch(self.epoch, position.step, position.step, 1, samples, assignment, samples_per_epoch, after)

    def trained_on(self, batch: GlobalBatch) -> None:
        """Note that an update by `batch` has been made, by this worker or a server."""
        self.steps += 1
        self.samples_seen += batch.assignment.global_size
        self.epoch, self._next = batch.epoch, batch.number + 1
        self._position = batch.position or self._position

    # --- checkpoints ---

    def state_dict(self, *, collective: bool = False) -> dict[str, Any]:
        """What a checkpoint keeps.

        Args:
            collective: whether all workers call this together: then streams' own states are among it; without them, a
                resumed run reads again what it had read.
        """
        course: dict[str, Any] = {
            "epoch": self.epoch,
            "next": self._next,
            "num_samples": self._set_size,
            "order": self.digest,
            "told_steps": list((self._told_before | self._told_steps).items()),
        }
        if self._position is not None:
            states: dict[str, Any] = {}
            for known in self.gather(dict(self._position.states)) if collective else []:
                states |= known
            taken, fingerprint = list(self._position.taken), self._position.fingerprint
            course["stream"] = {"taken": taken, "states": json.dumps(states), "fingerprint": fingerprint}
        return {"steps": self.steps, "samples_seen": self.samples_seen, "course": course}

    def load_state_dict(self, state: dict[str, Any], *, check_order: bool = True) -> None:
        """Continue from `state`.

        Args:
            check_order: whether the order of samples, and what `total_steps` tells, have to be the same as then.

        Raises:
            JobError: `total_steps` has told the script another number than then.
        """
        self.steps, self.samples_seen, course = state["steps"], state["samples_seen"], state["course"]
        self.epoch, self._next = course["epoch"], course["next"]
        self._set_size, self.digest = course["num_samples"], course["order"]
        if (stream := course.get("stream")) is not None:
            fingerprint = stream["fingerprint"] if check_order else 0
            states = json.loads(stream["states"])
            self._position = StreamPosition(self._next, tuple(stream["taken"]), states, fingerprint)
        self._is_resumed, self._checks_order = True, check_order
        self._told_before = dict(course.get("told_steps", ())) if check_order else {}
        self._check_told_steps()
