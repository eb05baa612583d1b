"""When a run's state is saved: by the clock, by steps, at epochs' ends, on a signal, on an error, and at the end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from paceline.checkpoint import Saver, SharedCatalogue, Snapshot, newest_good, newest_that, open_storage, read_together
from paceline.checkpoint.manifest import Manifest
from paceline.errors import CheckpointError
from paceline.object_collectives import broadcast_object, scatter_objects
from paceline.spec.job import CheckpointSpec
from paceline.train.state import hand_out
from paceline.train.status_exchange import Request

_FAREWELL_S = 5.0
"""After an error, other workers have so long to write their parts of a checkpoint that was begun before it."""


@dataclass(frozen=True)
class Found:
    """A checkpoint, as far as this worker needs it."""

    name: str
    shared: dict[str, Any]
    """What all workers had alike, and the job."""
    own: dict[str, Any]
    """What this one had for itself."""


class Checkpoints:
    """Saves one run, and knows what there was to resume from."""

    def __init__(
        self,
        address: str,
        spec: CheckpointSpec,
        group: dist.ProcessGroup | None,
        take: Callable[[bool], Snapshot | None],
        say: Callable[[str], None],
        parts: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """A common act of all workers of `group`, which lives in host memory.

        Args:
            take: the run's state now; None where workers' weights differ until they meet again. A common act if its
                argument is true.
            say: told what a user should know, on rank 0.
            parts: what this worker needs of what all had alike, before it is read (`Trained.parts`), where none holds
                all of it; None: every worker holds all.
        """
        self._spec = spec
        self._take = take
        self._say = say
        self._group = group
        self._parts = parts
        self._rank = 0 if group is None else dist.get_rank(group)
        self._storage = open_storage(address)
        self._requests: set[Request] = set()
        self._is_due = False
        self._saved_at = time.monotonic()
        self._handlers: dict[int, Any] = {}
        self._found = self.read()
        self._saver = Saver(self._storage, spec, group, say)
        if self._found is not None:
            self._saver.last_step = self._found.shared["progress"]["steps"]
        self._heed_signals()

    def take_found(self) -> Found | None:
        """What there was to resume from, once: it is as large as what it is put into, and not kept."""
        found, self._found = self._found, None
        return found

    def read(self) -> Found | None:
        """The newest good one; a common act.

        Raises:
            CheckpointError: there are some, and none is good.
        """
        if self._group is None or self._parts is None:
            return self._read_whole()
        return self._read_parts(self._group, self._parts)

    def _read_whole(self) -> Found | None:
        """Rank 0 reads and checks it; all others hear from it."""
        name = why_not = shared = None
        owns: list[dict[str, Any]] = []
        if self._rank == 0:
            try:
                checkpoint, problems = newest_good(self._storage)
                for problem in problems:
                    self._say(problem)
                if checkpoint is not None:
                    self._check_is_run(checkpoint.name, checkpoint.manifest)
                    name = checkpoint.name
                    shared = {"job": checkpoint.manifest.job, **checkpoint.shared}
                    owns = [checkpoint.own(rank) for rank in range(checkpoint.manifest.world_size)]
            except (CheckpointError, OSError) as problem:
                name, why_not = None, str(problem)
        name, why_not, shared = broadcast_object((name, why_not, shared), self._group)
        if why_not is not None:
            raise CheckpointError(why_not)
        if name is None:
            return None
        num_workers = 1 if self._group is None else dist.get_world_size(self._group)
        return Found(name, shared, scatter_objects(hand_out(owns, num_workers), self._group))

    def _read_parts(self, group: dist.ProcessGroup, parts: Callable[[dict[str, Any]], dict[str, Any]]) -> Found | None:
        """Every worker reads what it will hold; together they check all of it. None of them has a state of its own."""

        def want(shared: dict[str, Any]) -> dict[str, Any]:
            return parts(shared) if _is_run(shared) else {}

        def read(name: str) -> tuple[str, Manifest, dict[str, Any]]:
            return name, *read_together(self._storage, name, group, want)

        try:
            found, problems = newest_that(read, SharedCatalogue(self._storage, group))
        except OSError as failure:
            raise CheckpointError(str(failure)) from None
        for problem in problems:
            self._say(problem)
        if found is None:
            return None
        name, manifest, shared = found
        self._check_is_run(name, manifest)
        if any(manifest.workers):
            raise CheckpointError(
                f"{name} in {self._storage.address} has what each worker had for itself (means of weights that were "
                "apart, or gradients owed), which a spread model cannot go on with; resume it with --strategy dp."
            )
        return Found(name, {"job": manifest.job, **shared}, {})

    def _check_is_run(self, name: str, manifest: Manifest) -> None:
        if not _is_run(manifest.values):
            raise CheckpointError(f"{name} in {self._storage.address} was not saved by a run; begin in another folder.")

    def read_again(self) -> Found | None:
        """The same, with what has been saved meanwhile."""
        self._saver.wait()
        return self.read()

    def step_ended(self, step: int, received: Set[Request]) -> None:
        """A common act after every step; saves if that is due, and ends the process if that was asked for.

        Args:
            received: what any worker wished a step ago.

        Raises:
            SystemExit: SIGTERM came to some worker, and all is saved.
        """
        if Request.FAILED in received:
            self._saver.give_up()
        self._is_due |= Request.SAVE in received or Request.LEAVE in received or step == self.next_save(step - 1)
        if self._is_due and Request.BUSY not in received:
            self._save()
        if Request.LEAVE in received and not self._is_due:
            self._saver.wait()
            raise SystemExit(128 + signal.SIGTERM)

    def next_save(self, step: int) -> float:
        """The number of the next step after `step` that is saved in any case; infinite if none is."""
        every = self._spec.every_steps
        return math.inf if every is None else (step // every + 1) * every

    def epoch_ended(self) -> None:
        """An epoch and what follows it is over: the next chance is taken to save it."""
        self._is_due |= self._spec.every_epoch

    def run_ended(self, step: int) -> None:
        """Save what is not saved yet, and wait until it is written. A common act."""
        self._saver.wait()
        if self._saver.last_step != step:
            self._save()
        self._saver.wait()

    def rescue(self, *, is_whole: bool) -> None:
        """After an error: save what this worker has, without the others, who may be gone, if that is all there is.

        Weights are the same on all workers, so whoever comes first does it for all that have come as far.

        Args:
            is_whole: whether what this worker has is from one moment; else only what is being written is finished.
        """
        snapshot = self._take(False) if is_whole else None
        # What is being written is the last that there will be, where this worker has only a part of what comes after.
        self._saver.give_up(after_s=_FAREWELL_S if snapshot is None else 0.0)
        self._saver.wait()
        if snapshot is not None and not snapshot.own and snapshot.step != self._saver.last_step:
            self._saver.save_alone(snapshot)

    def close(self) -> None:
        """No more checkpoints; what is being written is finished."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self._saver.wait()

    def _save(self) -> None:
        snapshot = self._take(True)
        if snapshot is None:
            return
        self._is_due = False
        self._requests.discard(Request.SAVE)
        self._saved_at = time.monotonic()
        if snapshot.step != self._saver.last_step:
            self._saver.begin(snapshot)

    @property
    def wants_save(self) -> bool:
        """Whether one is due or wished here, and could be begun."""
        requests = self.requests()
        return Request.BUSY not in requests and (self._is_due or bool(requests & {Request.SAVE, Request.LEAVE}))

    def requests(self) -> set[Request]:
        """This worker's, to be told to all."""
        requests = set(self._requests)
        minutes = self._spec.every_minutes
        if self._rank == 0 and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes:
            requests.add(Request.SAVE)
        if self._saver.busy:
            requests.add(Request.BUSY)
        if self._saver.failed:
            requests.add(Request.FAILED)
        return requests

    def _heed_signals(self) -> None:
        """SIGUSR1: save. SIGTERM: save and leave; a second one leaves at once, as the handler before did."""
        if threading.current_thread() is not threading.main_thread():
            return

        def save(_number: int, _frame: FrameType | None) -> None:
            self._requests.add(Request.SAVE)

        def leave(number: int, _frame: FrameType | None) -> None:
            self._requests.add(Request.LEAVE)
            signal.signal(number, self._handlers[number])

        for number, handler in ((signal.SIGUSR1, save), (signal.SIGTERM, leave)):
            self._handlers[number] = signal.signal(number, handler)


def _is_run(shared: dict[str, Any]) -> bool:
    return "progress" in shared
