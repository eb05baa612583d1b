"""When a run's state is saved: by the clock, by steps, at epochs' ends, on a signal, on an error, and at the end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Set
from types import FrameType
from typing import Any

import torch.distributed as dist

from paceline.checkpoint import Saver, Snapshot
from paceline.checkpoint.load import folder_name
from paceline.checkpoint.storage import Storage
from paceline.spec.job import CheckpointSpec
from paceline.train.session.status_exchange import Request

_FAREWELL_S = 5.0
"""After an error, the time that other workers have to write their shards of a checkpoint begun before it."""


class Checkpoints:
    """Decides when a run is saved, and has it saved."""

    def __init__(
        self,
        storage: Storage,
        spec: CheckpointSpec,
        group: dist.ProcessGroup | None,
        take: Callable[[bool], Snapshot | None],
        say: Callable[[str], None],
        saved_step: int | None,
        will_save: Callable[[], None],
    ) -> None:
        """A collective of all workers of `group`, which uses CPU memory; None: there is one worker.

        Args:
            take: returns the run's state (`RunState.snapshot`); None if it cannot be saved now. A collective if its
                argument is true.
            say: receives messages for the user, on rank 0.
            saved_step: the step that the run was resumed from.
            will_save: called in a signal handler when this worker was asked to save and to end.
        """
        self._spec = spec
        self._take = take
        self._keeps_clock = group is None or dist.get_rank(group) == 0
        self._requests: set[Request] = set()
        self._is_due = False
        self._interrupted = False
        """Whether Ctrl-C was pressed."""
        self._say = say
        self._address = storage.address
        self._saved_at = time.monotonic()
        self._last_step = saved_step or 0
        """After which step it was last looked at what is due: workers that train alone do not meet after every one."""
        self._handlers: dict[int, Any] = {}
        self._saver = Saver(storage, spec, group, say, resumed_step=saved_step)
        self._saved_metrics: Mapping[str, float] | None = None
        """The metrics in the newest checkpoint that was begun; None: the run has begun none."""
        self._will_save = will_save
        self.was_saved: Callable[[int], None] = lambda _step: None
        """Receives the step of each complete checkpoint, on all workers after the same step; may be replaced."""
        self._in_writing: int | None = None
        """The step of a checkpoint that is not known to be complete."""
        self._handle_signals()

    def step_ended(self, step: int, received: Set[Request]) -> None:
        """Save if that is due, and end the process if that was requested. A collective after every step.

        Args:
            received: the requests of all workers from the step before.

        Raises:
            SystemExit: some worker got SIGTERM, and all is saved.
            KeyboardInterrupt: this one got SIGINT, and all is saved.
        """
        if Request.FAILED in received:
            self._saver.give_up()
            self._in_writing = None
        if Request.BUSY not in received:
            saved, self._in_writing = self._in_writing, None
            if saved is not None:
                self.was_saved(saved)
        self._is_due |= Request.SAVE in received or Request.LEAVE in received or step >= self.next_save(self._last_step)
        self._last_step = step
        if self._is_due and Request.BUSY not in received:
            self._save()
        if Request.LEAVE in received and not self._is_due:
            self.wait()
            self._say(_left(step, self.newest))
            if self._interrupted:
                raise KeyboardInterrupt
            raise SystemExit(128 + signal.SIGTERM)

    def next_save(self, step: int) -> float:
        """The number of the next step after `step` that is saved in any case; infinite if none is."""
        every = self._spec.every_steps
        return math.inf if every is None else (step // every + 1) * every

    def epoch_ended(self) -> None:
        """Note that an epoch has ended: the run is saved at the next opportunity."""
        self._is_due |= self._spec.every_epoch

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state of this step, unless that is done. A collective.

        Args:
            metrics: those of the last evaluation, by which the best checkpoint is found; where it came after the step
                was saved, the step is saved again. None: it is not.
        """
        if self._saver.last_step != step or metrics not in (None, self._saved_metrics):
            self.wait()
            self._is_due = True
            self._save(again=True)

    @property
    def newest(self) -> tuple[int, str] | None:
        """Step and address of the newest checkpoint that is complete, as rank 0 knows; None: there is none."""
        step = self._saver.written_step
        return None if step is None else (step, f"{self._address}/{folder_name(step)}")

    def rescue(self, *, is_whole: bool) -> None:
        """After an error: save this worker's state, without the others, which may be gone, if it is the whole state.

        Weights are the same on all workers, so the first worker saves for all at the same step.

        Args:
            is_whole: whether all of this worker's state belongs to the same step; else only the checkpoint in progress
                is finished.
        """
        snapshot = self._take(False) if is_whole else None
        # If this worker has no newer consistent state, the checkpoint in progress is the last one of the run.
        self._saver.give_up(after_s=_FAREWELL_S if snapshot is None else 0.0)
        self.wait()
        if snapshot is not None and not snapshot.own:
            self._saver.save_alone(snapshot)

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written."""
        self._saver.wait()

    def close(self) -> None:
        """Stop saving; the checkpoint in progress is finished."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self.wait()

    def _save(self, *, again: bool = False) -> None:
        """
        Args:
            again: whether to save a step that was saved before.
        """
        snapshot = self._take(True)
        if snapshot is None:
            return
        self._is_due = False
        self._requests.discard(Request.SAVE)
        self._saved_at = time.monotonic()
        if again or snapshot.step != self._saver.last_step:
            self._saver.begin(snapshot)
            self._in_writing, self._saved_metrics = snapshot.step, dict(snapshot.shared["metrics"])

    @property
    def wants_save(self) -> bool:
        """Whether a checkpoint is due or requested by this worker, and could be begun."""
        requests = self.requests()
        return Request.BUSY not in requests and (self._is_due or bool(requests & {Request.SAVE, Request.LEAVE}))

    def requests(self) -> set[Request]:
        """This worker's requests, for the status exchange."""
        requests = set(self._requests)
        minutes = self._spec.every_minutes
        if self._keeps_clock and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes:
            requests.add(Request.SAVE)
        if self._saver.busy:
            requests.add(Request.BUSY)
        if self._saver.failed:
            requests.add(Request.FAILED)
        return requests

    def _handle_signals(self) -> None:
        """SIGUSR1: save. SIGTERM and Ctrl-C: save and exit; a second one exits at once, by the previous handler."""
        if threading.current_thread() is not threading.main_thread():
            return

        def save(_number: int, _frame: FrameType | None) -> None:
            self._requests.add(Request.SAVE)

        def leave(number: int, _frame: FrameType | None) -> None:
            self._requests.add(Request.LEAVE)
            self._will_save()
            self._interrupted |= number == signal.SIGINT
            signal.signal(number, self._handlers[number])

        # Where Ctrl-C is ignored, as in the background of a shell, it stays so.
        heeds_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        endings = [signal.SIGTERM, *([signal.SIGINT] if heeds_interrupt else [])]
        for number, handler in ((signal.SIGUSR1, save), *((ending, leave) for ending in endings)):
            self._handlers[number] = signal.signal(number, handler)


def _left(step: int, newest: tuple[int, str] | None) -> str:
    """What is left of a run that was interrupted after this step."""
    if newest is None:
        return f"Interrupted after step {step}; nothing is saved."
    saved, place = newest
    return (
        f"Interrupted after step {step}; step {saved} is saved in\n{place}\n"
        "The same command with the same folder goes on from there."
    )
