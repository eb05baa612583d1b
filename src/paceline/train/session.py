"""The work of a run between its steps: the status of all workers, saving, resuming, the end.

A run is saved by the clock, by steps, at the ends of epochs, on a signal, on an error, and at its end. A worker gets a
signal, or reaches the checkpoint interval, at any moment, but all workers must save a checkpoint after the same step.
So at the end of every step each worker sends its status, and receives the status that was sent at the end of the step
before, during whose computation it was transferred: no worker waits.
"""

from __future__ import annotations

import contextlib
import enum
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.checkpoint.format import Storage, folder_name
from paceline.checkpoint.save import Saver
from paceline.data import Purpose
from paceline.data.randomness import key
from paceline.errors import PeerLost
from paceline.files import CHECKPOINTS_LOCK, lock_folder, make_run_folder
from paceline.heartbeat import beat, inside
from paceline.object_collectives import all_gather_objects, open_host_group
from paceline.parallel.pass_state import seed_generators
from paceline.spec import Plan
from paceline.train.batches import DataProgress
from paceline.train.peers import Watch, current_watch
from paceline.train.process_group import World
from paceline.train.run_state import ReadCheckpoint, RunState, newest_checkpoint

if TYPE_CHECKING:
    from paceline.train.run import Run

WINDOW_STEPS = 50
"""The number of steps whose median times are compared, so that single slow steps do not count."""
SLOW = 1.3
"""A straggler takes this many times the median of the others; less is the usual scatter of equal devices."""
_FAREWELL_S = 5.0
"""After an error, the time that other workers have to write their shards of a checkpoint begun before it."""


class Request(enum.IntEnum):
    """What a worker may request of all workers; the value is its index in the message."""

    SAVE = 0
    LEAVE = 1
    """After a checkpoint, end the run."""
    BUSY = 2
    """Begin no checkpoint: the previous one is still being written here."""
    STOP = 3
    """End the run as if its epochs were over."""


class StatusExchange:
    """One worker's side of the exchange in a group whose backend handles tensors in CPU memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank, self._world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._message = torch.zeros(len(Request) + self._world_size, dtype=torch.float64)
        """Room for the requests and the time of each worker."""
        self._in_flight: dist.Work | None = None

    def received(self) -> tuple[set[Request], list[float]]:
        """The requests of any worker, and the step time of each by rank, 0 if unknown: as sent last, once; waits until
        all workers have sent theirs."""
        if self._in_flight is not None:
            with inside("the exchange of all workers' requests"):
                self._in_flight.wait()
            self._in_flight = None
        numbers = self._message.tolist()
        self._message.zero_()  # each message counts once
        return {request for request in Request if numbers[request]}, numbers[len(Request) :]

    def send(self, requests: set[Request], own_time_s: float = 0.0) -> None:
        """Begin to send this worker's status. A collective after every step, between two of `received`."""
        for request in requests:
            self._message[request] = 1
        self._message[len(Request) + self._rank] = own_time_s
        if self._group is not None:
            # The maximum: any request counts, and each worker writes only its own entry.
            self._in_flight = dist.all_reduce(self._message, dist.ReduceOp.MAX, group=self._group, async_op=True)


class Stragglers:
    """Workers whose own part of a step takes longer than that of the others."""

    def __init__(self, plan: Plan) -> None:
        hostnames = [placed.hostname for placed in plan.placements for _ in range(placed.num_workers)]
        self._names = [f"Worker {rank}" + (f" on {host}" if host else "") for rank, host in enumerate(hostnames)]
        self._times: list[deque[float]] = [deque(maxlen=WINDOW_STEPS) for _ in self._names]
        self._num_steps = 0
        self._told: set[int] = set()

    def found(self, own_times_s: Sequence[float], step: int) -> list[str]:
        """Note a step's times, by rank, 0 if unknown; after a window compare each median with that of the others, and
        say in a sentence for each worker that it holds them up, once."""
        for times, own_time_s in zip(self._times, own_times_s, strict=True):
            times.extend([own_time_s] if own_time_s > 0 else [])
        self._num_steps += 1
        if self._num_steps % WINDOW_STEPS or not all(self._times) or len(self._times) < 2:
            return []
        medians, sentences = [np.median(times) for times in self._times], []
        for rank, own_s in enumerate(medians):
            others_s = np.median(medians[:rank] + medians[rank + 1 :])  # of two, one is half of any median
            if own_s > SLOW * others_s and rank not in self._told:
                self._told.add(rank)
                since = max(1, step - WINDOW_STEPS + 1)
                sentences.append(
                    f"{self._names[rank]} holds the others up since about step {since}: its part of a step takes "
                    f"{1e3 * own_s:.3g} ms, {own_s / others_s:.1f} times the median of the others."
                )
        return sentences


class SaveSignals:
    """SIGUSR1: save. SIGTERM and Ctrl-C: save and exit; a second one exits at once, by the previous handler."""

    def __init__(self) -> None:
        self.requests: set[Request] = set()
        self.is_interrupted = False
        """Whether Ctrl-C was pressed."""
        self._handlers: dict[int, Any] = {}
        """The previous ones, by the numbers of signals."""
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGUSR1, signal.SIGTERM]
            # Where Ctrl-C is ignored, as in the background of a shell, it stays so.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                numbers.append(signal.SIGINT)
            self._handlers = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.requests.add(Request.SAVE if number == signal.SIGUSR1 else Request.LEAVE)
        self.is_interrupted |= number == signal.SIGINT
        if number != signal.SIGUSR1:
            signal.signal(number, self._handlers[number])

    def close(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


@dataclass
class Stopping:
    """Whether the run ends early. Any worker may ask for it; all workers agree on when, and on why."""

    world: World
    progress: DataProgress
    begun_at: float
    """When the run was launched, in seconds since the epoch."""
    max_minutes: float | None = None
    """How long it may take, by the clock of rank 0."""
    reason: str | None = None
    """Why the run ends early, once all workers agree that it does."""
    is_out_of_time: bool = False
    """Whether it ends because of `max_minutes`, so that there is more to train."""
    _own: tuple[str, bool] | None = None
    """Why this worker asks for the end, and whether time is over."""

    @property
    def is_over(self) -> bool:
        """Whether no step is left, because of `max_steps`, or because the run was stopped."""
        return self.progress.steps_left == 0

    def ask(self, reason: str) -> None:
        """Ask for the end of the run; no collective. The first reason of the lowest rank counts."""
        self._own = self._own or (reason, False)

    def is_wanted(self) -> bool:
        """Whether this worker asks for the end, of which it tells the others; called after steps.

        Time is looked at here alone: every start makes at least one step, however long it took to begin.
        """
        limit_s = math.inf if self.max_minutes is None else 60 * self.max_minutes
        if self.world.rank == 0 and time.time() - self.begun_at >= limit_s:
            self._own = self._own or (f"max_minutes = {self.max_minutes:g} are over", True)
        return self.reason is None and self._own is not None

    def agree(self) -> None:
        """End the run if any worker has asked for it. A collective of all workers."""
        if self.reason is None:
            asked = [one for one in all_gather_objects(self._own, self.world.group) if one is not None]
            if asked:
                self.reason, self.is_out_of_time = asked[0]
                self.progress.end_here()


class Session:
    """The work of one worker between steps. Its methods are collectives except where they say otherwise.

    Attributes:
        is_consistent: whether weights, optimizers, buffers and progress all belong to the same step: not while a step
            changes what is not restored after an error.
        peers: the watch, where the backend lets workers wait for a lost one, so that it has to end that; else None.
        on_saved: receives the step of each complete checkpoint, on all workers after the same step; may be replaced.
    """

    def __init__(self, state: RunState, run: Run) -> None:
        self.state, self.world = state, run.world
        group, plan = run.world.group, run.plan
        # A separate group in CPU memory, whatever the others use: it communicates in parallel to them.
        self._group = None if group is None else open_host_group(group, "status of workers", plan.timeout_s)
        self._watch = current_watch()
        self.peers: Watch | None = None
        if group is not None and self._watch is not None and dist.get_backend(group) == "nccl":
            self._watch.abort, self.peers = group.abort, self._watch
        self.is_consistent = True
        self.on_saved: Callable[[int], None] = lambda _step: None
        self._run, self._stopping = run, run.stopping
        self._spec = state.job.kept_checkpoints
        self._status_exchange = StatusExchange(self._group)
        self._stragglers = Stragglers(plan)
        self._newest: Callable[[], ReadCheckpoint | None] = lambda: None
        """Reads the newest good checkpoint. A collective."""
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
        """The step after which it was last checked what is due: workers that train alone do not meet after each."""
        self._saved_metrics: Mapping[str, float] | None = None
        """The metrics in the newest checkpoint that was begun; None: the run has begun none."""
        self._in_writing: int | None = None
        """The step of a checkpoint that is not known to be complete."""
        self._is_reported = False
        """Whether the status in flight was sent since that checkpoint was begun."""

    # --- resuming ---

    def resume(self, checkpoint_address: str | None, *, force: bool) -> None:
        """Resume from the newest good checkpoint at an address if there is one, with `force` from one of another job
        too, and save there from now on. Raises `LaunchError` where another run saves there."""
        if checkpoint_address is None:
            return
        state = self.state
        storage = Storage(checkpoint_address)
        if storage.folder is not None:
            if self._watch is not None:  # reports go there, unless the launcher has named a folder
                self._watch.folder = self._watch.folder or storage.folder
            if self.world.rank == 0:  # object stores cannot be locked
                with contextlib.suppress(OSError):  # nothing can be written there; that is told when it is tried
                    make_run_folder(storage.folder)
                    self._at_close.enter_context(lock_folder(storage.folder, CHECKPOINTS_LOCK))
        wanted = None if state.holds_all else state.models.own_shards
        self._newest = lambda: newest_checkpoint(storage, self._group, self.say, wanted)
        found = self._newest()
        if found is not None:
            notes = state.restore(found, force=force)
            known = {kind: found.shared.get(kind, {}) for kind in ("frozen", "changed_frozen")}
            self._resumed = known | {"models": list(found.shared["models"])}, force
            self._last_step = state.progress.steps
            beat(self._last_step)
            self._run.notes += [f"resumed at step {self._last_step} from {found.name} in {checkpoint_address}", *notes]
            self.seed_between_steps()
        self._address = storage.address
        resumed_step = None if found is None else self._last_step
        self._saver = Saver(storage, self._spec, self._group, self.say, resumed_step=resumed_step)
        self._signals = SaveSignals()

    def add(self, name: str) -> None:
        """Give a model that was prepared after the first its state, if the run was resumed."""
        if self._resumed is None:
            return
        if name in self.state.models.by_name:
            found = self._newest()  # the shards of this model were not read before
            if found is not None and not (self._resumed[1] and name not in found.shared["models"]):
                self._run.notes += self.state.restore_model(name, found, force=self._resumed[1])
        self.seed_between_steps()

    def begin(self) -> None:
        """Before the first batch: all models are known. Raises `CheckpointError` where the checkpoint that was resumed
        is of a run with other models, or one of this run could not hold its state."""
        if self._resumed is not None:
            known, is_forced = self._resumed
            if not is_forced:
                self.state.models.check_complete(known)
            # Not earlier: what the script gives them before the first batch is for a run that begins.
            for note in self.state.models.put_frozen(known):
                self.note(note)
        self._resumed = None
        if self._saver is not None and self._saver.last_step is None:
            self._saver.check({"models": self.state.models.take(), "kept": self.state.kept.state_dict()})

    def roll_back(self) -> str | None:
        """Put weights and optimizer back to the newest good checkpoint, but for learning rates: the data goes on, and
        schedules with it. Returns its name; None if there is none."""
        if self._saver is not None:
            self._saver.wait()
        found = self._newest()
        if found is None:
            return None
        self.is_consistent = False
        for name, trained in self.state.models.by_name.items():
            with trained.rates.at_base():  # after which they are as before
                self.state.models.put(name, found.shared, found.own, hyper=True)
        return found.name

    # --- between steps ---

    def seed_between_steps(self, num_steps_on_batch: int = 0) -> None:
        """What a script draws after a step must not depend on the shards that this worker has computed. No collective.
        `num_steps_on_batch`: the steps made on the last batch, if there may be more; 0: it is done."""
        stream, step = Purpose.BETWEEN_STEPS, self.state.progress.steps
        seed_generators(key(self.state.job.seed, stream, num_steps_on_batch, step), self.world.device)

    def step_ended(self, own_time_s: float) -> None:
        """After every step: receive every worker's status of the step before, act on it, and send that of this step,
        with the time of this worker's last known step without waiting for others."""
        for sentence in self._stragglers.found(self._receive(), self.state.progress.steps):
            self.note(sentence)
        self._send(own_time_s)

    def epoch_ended(self) -> None:
        """Before the first step of the next epoch: save if that is due now. A run that is asked to end makes this step
        first: an epoch without any would be ended by the script once more."""
        if self._saver is not None:
            self._receive(may_stop=False)
            self._is_due |= self._spec.every_epoch
            self._send(may_stop=False)
            self._receive(may_stop=False)

    def on_pause(self) -> None:
        """Where all workers pause, as between updates by servers: exchange status at once, and save if due."""
        self._send()
        self._receive()

    def wants_pause(self) -> bool:
        """Whether this worker requests a checkpoint, and could write it now, or the end. No collective."""
        requests = self._requests()
        wants_save = self._is_due or bool(requests & {Request.SAVE, Request.LEAVE})
        return Request.STOP in requests or (wants_save and Request.BUSY not in requests)

    def _requests(self, *, may_stop: bool = True) -> set[Request]:
        """This worker's requests, for the others."""
        requests = {Request.STOP} if may_stop and self._stopping.is_wanted() else set()
        if self._saver is None or self._signals is None:
            return requests
        requests |= self._signals.requests
        minutes = self._spec.every_minutes
        if self.world.rank == 0 and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes:
            requests.add(Request.SAVE)
        if self._saver.busy:
            requests.add(Request.BUSY)
        return requests

    def _send(self, own_time_s: float = 0.0, *, may_stop: bool = True) -> None:
        self._is_reported = True
        self._status_exchange.send(self._requests(may_stop=may_stop), own_time_s)

    def _receive(self, *, may_stop: bool = True) -> list[float]:
        """Receive the status of all workers, and save or end the run as they ask; returns the times of their steps."""
        requests, own_times_s = self._status_exchange.received()
        if self._saver is not None and self._signals is not None:
            self._save_as_asked(self._saver, self._signals, requests)
        self._is_stop_asked |= Request.STOP in requests
        if may_stop and self._is_stop_asked:
            self._is_stop_asked = False
            self._stopping.agree()
        return own_times_s

    def _save_as_asked(self, saver: Saver, signals: SaveSignals, received: set[Request]) -> None:
        """Save if that is due; once all is saved, raise `KeyboardInterrupt` if this worker got SIGINT, else
        `SystemExit` if any got SIGTERM."""
        step = self.state.progress.steps
        is_reported, self._is_reported = self._is_reported, False
        if is_reported and Request.BUSY not in received and self._in_writing is not None:
            saved, self._in_writing = self._in_writing, None
            if not saver.failed:  # the same on all workers
                self.on_saved(saved)
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

    def say(self, text: str) -> None:
        """Tell the user, on rank 0. No collective."""
        self._run.say(text)

    def note(self, sentence: str) -> None:
        """Tell the user, and the run's report. No collective."""
        self._run.notes.append(sentence)
        self.say(sentence)

    def enter_together(self, what: str) -> None:
        """Wait until all workers are here. Where one is elsewhere, that is a hang, whose report says where each of them
        is; collectives of different sizes would end the process instead."""
        if self._group is not None:
            with inside(f"{what}, which all workers have to call,"):
                dist.monitored_barrier(self._group)

    def check_peers(self, *, has_waited: bool = False) -> None:
        """Before an update of weights and optimizer: wait for all that this worker's device has been given, sums of all
        workers' gradients among it, unless the host `has_waited` by reading what came of them. No collective. Raises
        `PeerLost` where a worker is gone, so that the sums may mean nothing."""
        if self.peers is not None:
            if self.world.device.type == "cuda" and not has_waited:
                torch.cuda.current_stream(self.world.device).synchronize()
            if (loss := self.peers.loss) is not None:
                raise loss

    def cause_of(self, error: BaseException) -> PeerLost | None:
        """The loss of a worker that led to an error; None if none did. No collective."""
        return None if self.peers is None else self.peers.loss_behind(error)

    # --- saving ---

    def next_save(self, step: int | None = None) -> float:
        """The number of the next step after `step` (None: the last one) that is saved in any case; infinite if none is.
        No collective."""
        every = None if self._saver is None else self._spec.every_steps
        step = self.state.progress.steps if step is None else step
        return math.inf if every is None else (step // every + 1) * every

    def save(self, *, for_metrics: bool = True) -> None:
        """Save the state as it is now, unless that is done: for a step that was saved before its evaluation, again with
        `for_metrics`, by which the best checkpoint is found."""
        metrics = self.state.metrics if for_metrics else None
        saver = self._saver
        if saver is None or (saver.last_step == self.state.progress.steps and metrics in (None, self._saved_metrics)):
            return
        saver.wait()
        self._is_due = True
        self._save_now(saver, again=True)

    def _save_now(self, saver: Saver, *, again: bool = False) -> None:
        """Save the state, with `again` even if this step was saved before."""
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
            self._is_reported = False

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
        """At the end of training: save any unsaved state. A script that has left its loop before it took all batches
        of the last epoch has not come to the epoch's end."""
        self._status_exchange.received()  # no message stays in flight
        if self._saver is not None:
            if is_between_epochs:
                self.state.progress.leave_epoch()
            self.save(for_metrics=False)
            self._saver.wait()
            if any(all_gather_objects(self._saver.failed, self._group)):  # once more: there is no later one
                self._save_now(self._saver, again=True)
                self._saver.wait()
        if self.peers is not None:
            self.peers.allow_ends()

    def rescue(self, *, is_whole: bool) -> None:
        """After an error: save this worker's state, without the others, which may be gone, if it is the whole state.
        No collective. Weights are the same on all workers, so the first worker saves for all at the same step. Where
        not all of the state belongs to the same step, only the checkpoint in progress is finished."""
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
