"""The work of a run between its steps: the status of all workers, saving, resuming, the end.

A run is saved by the clock, by steps, at the ends of epochs, on a signal, on an error, and at its end.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch.distributed as dist

from paceline.checkpoint import Saver, open_storage
from paceline.checkpoint.load import folder_name
from paceline.folder_lock import CHECKPOINTS_LOCK, hold_folder
from paceline.heartbeat import Heartbeat
from paceline.process_groups import open_host_group
from paceline.regular_files import make_run_folder
from paceline.spec import Plan
from paceline.train.process.process_group import World
from paceline.train.process.watch import report_into
from paceline.train.session.peer_watch import watch_peers
from paceline.train.session.resume import CheckpointReader
from paceline.train.session.run_state import RunState
from paceline.train.session.status import Request, SaveSignals, StatusExchange, Stopping, Stragglers

_FAREWELL_S = 5.0
"""After an error, the time that other workers have to write their shards of a checkpoint begun before it."""


class Session:
    """The work of one worker between steps. Its methods are collectives except where they say otherwise.

    Attributes:
        is_consistent: whether weights, optimizers, buffers and progress all belong to the same step: not while a step
            changes what is not restored after an error.
        tell_saved: receives the step of each complete checkpoint, on all workers after the same step; may be replaced.
    """

    def __init__(
        self,
        state: RunState,
        plan: Plan,
        world: World,
        heartbeat: Heartbeat,
        say: Callable[[str], None],
        notes: list[str],
        stopping: Stopping,
    ) -> None:
        """
        Args:
            say: receives messages for the user, on rank 0.
            notes: receives notes for the run's report.
            stopping: whether the run ends early.
        """
        # A separate group in CPU memory, whatever the others use: it communicates in parallel to them.
        self._group = None if world.group is None else open_host_group(plan.timeout_s)
        self.peers = watch_peers(world.group, world.device)
        self.state, self.world, self.heartbeat, self.say = state, world, heartbeat, say
        self.is_consistent = True
        self.tell_saved: Callable[[int], None] = lambda _step: None
        self._notes, self._stopping = notes, stopping
        self._spec = state.job.kept_checkpoints
        self._status_exchange = StatusExchange(self._group)
        hostnames = [placed.hostname for placed in plan.placements for _ in range(placed.num_workers)]
        names = [f"Worker {rank}" + (f" on {hostname}" if hostname else "") for rank, hostname in enumerate(hostnames)]
        self._stragglers = Stragglers(names)
        self._reader: CheckpointReader | None = None
        self._saver: Saver | None = None
        """None: the run saves nothing, or has not been resumed yet."""
        self._signals: SaveSignals | None = None
        self._address = ""
        self._resumed: tuple[dict[str, Any], bool] | None = None
        """Until the first batch: what the checkpoint says of its models, and whether one of another job may be used."""
        self._at_close = contextlib.ExitStack()
        self._is_stop_asked = False
        """Whether any worker has asked for the end of the run."""
        self._is_due = False
        """Whether the run is to be saved as soon as no worker writes."""
        self._saved_at = time.monotonic()
        self._last_step = 0
        """After which step it was last looked at what is due: workers that train alone do not meet after every one."""
        self._saved_metrics: Mapping[str, float] | None = None
        """The metrics in the newest checkpoint that was begun; None: the run has begun none."""
        self._in_writing: int | None = None
        """The step of a checkpoint that is not known to be complete."""

    # --- resuming ---

    def resume(self, checkpoint_address: str | None, *, force: bool) -> bool:
        """Resume from the newest good checkpoint if there is one, and save there from now on; whether it resumed.

        Args:
            checkpoint_address: where checkpoints are; None: there are none.
            force: whether to resume from a checkpoint of another job, too.

        Raises:
            LaunchError: another run saves there.
        """
        if checkpoint_address is None:
            return False
        state = self.state
        storage = open_storage(checkpoint_address)
        if storage.folder is not None:
            report_into(storage.folder)
        if self.world.rank == 0 and storage.folder is not None:  # object stores cannot be locked
            with contextlib.suppress(OSError):  # nothing can be written there; that is told when it is tried
                make_run_folder(storage.folder)
                self._at_close.enter_context(hold_folder(storage.folder, CHECKPOINTS_LOCK))
        wanted = None if state.holds_all else state.models.own_shards
        self._reader = CheckpointReader(storage, self._group, self.say, wanted)
        found = self._reader.newest()
        if found is not None:
            notes = state.restore(found, force=force)
            known = {key: found.shared.get(key, {}) for key in ("frozen", "changed_frozen")}
            self._resumed = known | {"models": list(found.shared["models"])}, force
            self._last_step = state.progress.steps
            self.heartbeat.step(self._last_step)
            self._notes.append(f"resumed at step {self._last_step} from {found.name} in {checkpoint_address}")
            for note in notes:
                self.note(note)
        self._address = storage.address
        resumed_step = None if found is None else self._last_step
        self._saver = Saver(storage, self._spec, self._group, self.say, resumed_step=resumed_step)
        self._signals = SaveSignals()
        return found is not None

    def add(self, name: str) -> bool:
        """Give a model that was prepared after the first its state; whether the run was resumed."""
        if self._resumed is None or self._reader is None:
            return False
        if name in self.state.models.by_name:
            found = self._reader.newest()  # the shards of this model were not read before
            assert found is not None
            for note in self.state.restore_model(name, found, force=self._resumed[1]):
                self.note(note)
        return True

    def begin(self) -> None:
        """Before the first batch: all models are known.

        Raises:
            CheckpointError: the checkpoint that was resumed is of a run with other models.
        """
        if self._resumed is not None:
            known, is_forced = self._resumed
            if not is_forced:
                self.state.models.check_complete(known)
            # Not earlier: what the script gives them before the first batch is for a run that begins.
            for note in self.state.models.put_frozen(known):
                self.note(note)
        self._resumed = None

    def roll_back(self) -> str | None:
        """Put weights and optimizer back to the newest good checkpoint; its name, None if there is none."""
        if self._reader is None or self._saver is None:
            return None
        self._saver.wait()
        found = self._reader.newest()
        if found is None:
            return None
        self.is_consistent = False
        for name in self.state.models.by_name:
            self.state.models.put(name, found.shared, found.own, hyper=True)
        return found.name

    # --- between steps ---

    def step_ended(self, own_time_s: float) -> None:
        """After every step: receive every worker's status of the step before, act on it, and send that of this step.

        Args:
            own_time_s: the time of this worker's last known step without waiting for others.
        """
        step = self.state.progress.steps
        own_times_s = self._receive()
        self._stop_if_asked()
        for note in self._stragglers.note(step, own_times_s):
            self.note(note)
        self._status_exchange.send(self._all_requests(), own_time_s)

    def epoch_ended(self) -> None:
        """Before the first step of the next epoch: save if that is due now. A run that is asked to end makes this step
        first: an epoch without any would be ended by the script once more."""
        if self._saver is not None:
            self._receive()
            self._is_due |= self._spec.every_epoch
            self._status_exchange.send(self._requests(), 0.0)
            self._receive()

    def on_pause(self) -> None:
        """Where all workers pause, as between updates by servers: exchange status at once, and save if due."""
        self._status_exchange.send(self._all_requests(), 0.0)
        self._receive()
        self._stop_if_asked()

    def wants_pause(self) -> bool:
        """Whether this worker requests a checkpoint, and could write it now, or the end. No collective."""
        requests = self._all_requests()
        wants_save = self._is_due or bool(requests & {Request.SAVE, Request.LEAVE})
        return Request.STOP in requests or (wants_save and Request.BUSY not in requests)

    def _all_requests(self) -> set[Request]:
        """This worker's requests, for the others."""
        return self._requests() | ({Request.STOP} if self._stopping.is_wanted() else set())

    def _requests(self) -> set[Request]:
        """Those about saving."""
        if self._saver is None or self._signals is None:
            return set()
        requests = set(self._signals.requests)
        minutes = self._spec.every_minutes
        if self.world.rank == 0 and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes:
            requests.add(Request.SAVE)
        if self._saver.busy:
            requests.add(Request.BUSY)
        if self._saver.failed:
            requests.add(Request.FAILED)
        return requests

    def _receive(self) -> tuple[float, ...]:
        """Receive the status of all workers and save if they ask for it; returns the times of their last steps."""
        with self.heartbeat.inside("paceline", "the exchange of all workers' requests"):
            status = self._status_exchange.received()
        if self._saver is not None and self._signals is not None:
            self._save_as_asked(self._saver, self._signals, status.requests)
        self._is_stop_asked |= Request.STOP in status.requests
        return status.own_times_s

    def _stop_if_asked(self) -> None:
        if self._is_stop_asked:
            self._is_stop_asked = False
            self._stopping.agree()

    def _save_as_asked(self, saver: Saver, signals: SaveSignals, received: Set[Request]) -> None:
        """Save if that is due, and end the process if that was requested.

        Args:
            received: the requests of all workers.

        Raises:
            SystemExit: some worker got SIGTERM, and all is saved.
            KeyboardInterrupt: this one got SIGINT, and all is saved.
        """
        step = self.state.progress.steps
        if Request.FAILED in received:
            saver.give_up()
            self._in_writing = None
        if Request.BUSY not in received and self._in_writing is not None:
            saved, self._in_writing = self._in_writing, None
            self.tell_saved(saved)
        self._is_due |= bool(received & {Request.SAVE, Request.LEAVE}) or step >= self.next_save(self._last_step)
        self._last_step = step
        if self._is_due and Request.BUSY not in received:
            self._save_now(saver)
        if Request.LEAVE in received and not self._is_due:
            saver.wait()
            newest, what = saver.written_step, "nothing is saved."
            if newest is not None:
                what = f"step {newest} is saved in\n{self.newest_checkpoint}\n"
                what += "The same command with the same folder goes on from there."
            self.say(f"Interrupted after step {step}; {what}")
            if signals.is_interrupted:
                raise KeyboardInterrupt
            raise SystemExit(128 + signal.SIGTERM)

    def note(self, sentence: str) -> None:
        """Tell the user, and the run's report. No collective."""
        self._notes.append(sentence)
        self.say(sentence)

    def enter_together(self, what: str) -> None:
        """Wait until all workers are here. Where one is elsewhere, that is a hang, whose report says where each of them
        is; collectives of different sizes would end the process instead."""
        if self._group is not None:
            with self.heartbeat.inside("paceline", f"{what}, which all workers have to call,"):
                dist.monitored_barrier(self._group)

    def check_peers(self, *, has_waited: bool = False) -> None:
        """Before an update of weights and optimizer; as `PeerWatch.check` where there is one. No collective."""
        if self.peers is not None:
            self.peers.check(has_waited=has_waited)

    # --- saving ---

    def next_save(self, step: int | None = None) -> float:
        """The number of the next step after `step` (None: the last one) that is saved in any case; infinite if none is.
        No collective."""
        every = None if self._saver is None else self._spec.every_steps
        step = self.state.progress.steps if step is None else step
        return math.inf if every is None else (step // every + 1) * every

    def save(self) -> None:
        """Save the state as it is now, unless that is done."""
        self._save_unless_done(self.state.metrics)

    def _save_unless_done(self, metrics: Mapping[str, float] | None) -> None:
        """
        Args:
            metrics: those of the last evaluation, by which the best checkpoint is found; where it came after the step
                was saved, the step is saved again. None: it is not.
        """
        saver = self._saver
        if saver is None or (saver.last_step == self.state.progress.steps and metrics in (None, self._saved_metrics)):
            return
        saver.wait()
        self._is_due = True
        self._save_now(saver, again=True)

    def _save_now(self, saver: Saver, *, again: bool = False) -> None:
        """
        Args:
            again: whether to save a step that was saved before.
        """
        snapshot = self.state.snapshot(collective=True)
        if snapshot is None:
            return
        self._is_due = False
        if self._signals is not None:
            self._signals.requests.discard(Request.SAVE)
        self._saved_at = time.monotonic()
        if again or snapshot.step != saver.last_step:
            saver.begin(snapshot)
            self._in_writing, self._saved_metrics = snapshot.step, dict(snapshot.shared["metrics"])

    @property
    def newest_checkpoint(self) -> str | None:
        """The address of the newest checkpoint that is complete, as rank 0 knows, or that there is none; None: the run
        saves none."""
        if self._saver is None:
            return None
        step = self._saver.written_step
        return "none was written" if step is None else f"{self._address}/{folder_name(step)}"

    # --- the end ---

    def finish(self, *, is_between_epochs: bool) -> None:
        """At the end of training: save any unsaved state.

        Args:
            is_between_epochs: whether the script has taken all batches of the last epoch. One that has left its loop
                before has not come to the epoch's end.
        """
        self._status_exchange.received()  # no message stays in flight
        if self._saver is not None:
            if is_between_epochs:
                self.state.progress.leave_epoch()
            self._save_unless_done(None)
            self._saver.wait()
        if self.peers is not None:
            self.peers.close()

    def rescue(self, *, is_whole: bool) -> None:
        """After an error: save this worker's state, without the others, which may be gone, if it is the whole state.
        No collective. Weights are the same on all workers, so the first worker saves for all at the same step.

        Args:
            is_whole: whether all of this worker's state belongs to the same step; else only the checkpoint in progress
                is finished.
        """
        if self._saver is None:
            return
        snapshot = self.state.snapshot(collective=False) if is_whole else None
        # If this worker has no newer consistent state, the checkpoint in progress is the last one of the run.
        self._saver.give_up(after_s=_FAREWELL_S if snapshot is None else 0.0)
        self._saver.wait()
        if snapshot is not None and not snapshot.own:
            self._saver.save_alone(snapshot)

    def close(self) -> None:
        """Stop saving; the checkpoint in progress is finished."""
        if self._saver is not None:
            self._saver.wait()
        self._at_close.close()
        if self._signals is not None:  # last: a launcher that has seen a failure ends all workers
            self._signals.close()
