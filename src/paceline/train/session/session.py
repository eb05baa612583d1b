"""The work of a run between its steps: save and resume, status exchange, detection of stragglers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint import Snapshot, open_storage
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError, JobError, shortened
from paceline.folder_lock import CHECKPOINTS_LOCK, hold_folder
from paceline.heartbeat import Heartbeat
from paceline.process_groups import open_host_group
from paceline.regular_files import make_run_folder
from paceline.spec import Job, Plan
from paceline.spec.codec import MAY_DIVERGE, from_mapping
from paceline.spec.job import differences
from paceline.spec.plan import EXCLUDED
from paceline.train.batches.data_progress import DataProgress
from paceline.train.optimizers.optim import ends_with_epochs
from paceline.train.process.process_group import World, leave_at_once
from paceline.train.records.noise_meter import NoiseMeter
from paceline.train.session.checkpoints import Checkpoints
from paceline.train.session.kept import Kept
from paceline.train.session.peer_watch import watch_peers
from paceline.train.session.resume import CheckpointReader, Found
from paceline.train.session.state import TrainedModels
from paceline.train.session.status_exchange import Request, Status, StatusExchange
from paceline.train.session.stopping import Stopping
from paceline.train.session.stragglers import Stragglers
from paceline.words import on_one_line


@dataclass(frozen=True)
class _SavedMetrics:
    """The metrics of the last evaluation, as a checkpoint holds them."""

    metrics: dict[str, float] = field(metadata=MAY_DIVERGE)


@contextlib.contextmanager
def _as_saved(name: str) -> Iterator[None]:
    """A context that turns errors while a state is loaded into a `CheckpointError`: its checksums are right, but it is
    not a state that this run can load."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        why = f"{type(problem).__name__}: {shortened(on_one_line(str(problem)), 200)}"
        raise CheckpointError(
            f"The checkpoint {name} holds no state that this run can resume from ({why})."
        ) from problem


@dataclass(frozen=True)
class RunState:
    """All that a checkpoint holds of a run."""

    job: Job
    progress: DataProgress
    noise: NoiseMeter
    models: TrainedModels
    kept: Kept
    metrics: dict[str, float]
    """The metrics of the last evaluation; changed in place."""

    def snapshot(self, collective: bool) -> Snapshot | None:
        """The state now; None where workers' weights differ and this step is no synchronisation point.

        Args:
            collective: whether all workers call this together; else None, too, where this worker holds only a shard
                of the model.
        """
        engines = [trained.engine for trained in self.models.by_name.values()]
        if collective:
            is_synchronised = [engine.sync_buffers() for engine in engines]  # collectives of every one of them
            is_possible = all(is_synchronised)
        else:
            is_possible = all(engine.holds_all and not engine.weights_diverge for engine in engines)
        if not is_possible:
            return None
        shared, own = self.models.take()
        shared |= {
            "progress": self.progress.state_dict(collective=collective),
            "noise": self.noise.state_dict(),
            "metrics": self.metrics,
            "kept": self.kept.state_dict(),
        }
        return Snapshot(self.progress.steps, self.job.to_mapping(), shared, own, is_part=not self.holds_all)

    @property
    def holds_all(self) -> bool:
        """Whether every worker holds all models and their optimizers."""
        return all(trained.engine.holds_all for trained in self.models.by_name.values())

    def restore(self, found: Found, *, force: bool) -> list[str]:
        """Resume from a checkpoint; returns notes. Raises `JobError` if it is of another job, unless `force` is set."""
        shared = found.shared
        with _as_saved(found.name):
            before, changes = self._changes(shared)
            if changes and not force:
                raise JobError(
                    f"The checkpoint to resume belongs to another job: {'; '.join(changes)}{_why(before, self.job)}. "
                    "Set it back, choose another folder, or resume nevertheless with force = True."
                )
            for name in self.models.by_name:
                self.models.put(name, shared, found.own, hyper=not changes)
            self.progress.load_state_dict(shared["progress"], check_order=not force)
            self.noise.load_state_dict(shared["noise"])
            self.metrics.update(from_mapping(_SavedMetrics, {"metrics": shared["metrics"]}).metrics)
            # A new scheduler writes its first learning rate into the optimizer, and loading its state leaves it there.
            self.kept.load_state_dict(shared["kept"], (lambda: None) if changes else self.models.hyperparameters())
            names = () if changes else self.models.by_name
            return [note for name in names for note in self.models.go_on(name, shared, found.own)]

    def restore_model(self, name: str, found: Found, *, force: bool) -> list[str]:
        """Give a model that was prepared after the others its state; with `force` it begins anew if there is none.
        Returns notes. Raises `CheckpointError` where the checkpoint has no such model."""
        if force and name not in found.shared["models"]:
            return []
        with _as_saved(found.name):
            changes = self._changes(found.shared)[1]
            self.models.put(name, found.shared, found.own, hyper=not changes)
            return [] if changes else self.models.go_on(name, found.shared, found.own)

    def _changes(self, shared: dict[str, Any]) -> tuple[Job, list[str]]:
        """The job of a checkpoint, and its differences from this run's job that change the result."""
        # Converted to a job: keys of a later release get their defaults.
        before = Job.from_mapping(shared["job"])
        changes = differences(before.to_mapping(), self.job.to_mapping())
        if self.job.epochs > before.epochs and not ends_with_epochs(before):
            changes = [change for change in changes if not change.startswith("epochs was ")]  # it goes on
        return before, changes


def _why(before: Job, job: Job) -> str:
    """Why a run cannot go on as another job, where that is not plain from what differs."""
    if job.epochs > before.epochs and ends_with_epochs(before):
        return " (its learning rates follow a schedule that ends with the epochs, so more would have changed them all)"
    if job.precision != before.precision:
        return f" (where 'auto' means {job.precision!r}, name precision = {before.precision!r} to go on in it)"
    return ""


class Session:
    """The work of one worker between steps. Its methods are collectives except for `rescue`."""

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
        group = None if world.group is None else open_host_group(plan.timeout_s)
        self.peers = watch_peers(world.group, world.device)
        self.state = state
        self._plan = plan
        self.world = world
        self.heartbeat = heartbeat
        self.say = say
        self.is_consistent = True
        """Whether weights, optimizers, buffers and progress all belong to the same step: not while a step changes what
        is not restored after an error."""
        self._notes = notes
        self._stopping = stopping
        self._status_exchange = StatusExchange(group)
        self._stragglers = Stragglers(_worker_names(plan))
        self._group = group
        self._reader: CheckpointReader | None = None
        self._checkpoints: Checkpoints | None = None
        self._resumed: tuple[dict[str, Any], bool] | None = None
        """Until the first batch: what the checkpoint says of its models, and whether one of another job may be used."""
        self._held = contextlib.ExitStack()
        """What keeps other runs away from the checkpoints."""

    def resume(self, checkpoint_address: str | None, *, force: bool) -> bool:
        """Resume from the newest good checkpoint if there is one, and save there from now on; whether it resumed.

        Args:
            checkpoint_address: where checkpoints are; None: there are none.
            force: whether to resume from a checkpoint of another job, too.
        """
        if checkpoint_address is None:
            return False
        state = self.state
        storage = open_storage(checkpoint_address)
        if self.world.rank == 0:
            self._hold(storage)
        wanted = None if state.holds_all else state.models.own_shards
        self._reader = CheckpointReader(storage, self._group, self.say, state.job.aggregation.groups, wanted)
        found = self._reader.newest()
        step = None
        if found is not None:
            notes = state.restore(found, force=force)
            known = {key: found.shared.get(key, {}) for key in ("frozen", "changed_frozen")}
            self._resumed = known | {"models": list(found.shared["models"])}, force
            step = state.progress.steps
            self.heartbeat.step(step)
            self._notes.append(f"resumed at step {step} from {found.name} in {checkpoint_address}")
            for note in notes:
                self.note(note)
        # The launcher waits for a worker that says it will save.
        told = self.say, step, self.heartbeat.save
        self._checkpoints = Checkpoints(storage, state.job.kept_checkpoints, self._group, state.snapshot, *told)
        return found is not None

    def _hold(self, storage: Storage) -> None:
        """Keep other runs away from a folder; object stores cannot be locked.

        Raises:
            LaunchError: another run saves there.
        """
        if storage.folder is not None:
            with contextlib.suppress(OSError):  # nothing can be written there; that is told when it is tried
                make_run_folder(storage.folder)
                self._held.enter_context(hold_folder(storage.folder, CHECKPOINTS_LOCK))

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
        if self._reader is None or self._checkpoints is None:
            return None
        self._checkpoints.wait()
        found = self._reader.newest()
        if found is None:
            return None
        self.is_consistent = False
        for name in self.state.models.by_name:
            self.state.models.put(name, found.shared, found.own, hyper=True)
        return found.name

    def step_ended(self, own_time_s: float) -> None:
        """After every step: receive every worker's status of the step before, act on it, and send that of this step.

        Args:
            own_time_s: the time of this worker's last known step without waiting for others.
        """
        step = self.state.progress.steps
        status = self._received()
        for note in self._stragglers.note(step, status.own_times_s):
            self.note(note)
        slower = self._plan.exclude_slower
        if slower is not None and self.world.rank in self._stragglers.lasting(slower):
            leave_at_once(EXCLUDED)  # the others notice, save a checkpoint, and are restarted without it
        self._status_exchange.send(self._requests(), own_time_s)

    def _requests(self) -> set[Request]:
        """This worker's requests, for the others."""
        requests = set() if self._checkpoints is None else self._checkpoints.requests()
        return requests | {Request.STOP} if self._stopping.is_wanted() else requests

    def _received(self) -> Status:
        """Receive the status of all workers, and carry out their requests."""
        status = self._status_exchange.received()
        if self._checkpoints is not None:
            self._checkpoints.step_ended(self.state.progress.steps, status.requests)
        if Request.STOP in status.requests:
            self._stopping.agree()
        return status

    def note(self, sentence: str) -> None:
        """Tell the user, and the run's report."""
        self._notes.append(sentence)
        self.say(sentence)

    def enter_together(self, what: str) -> None:
        """Wait until all workers are here. Where one is elsewhere, that is a hang, whose report says where each of them
        is; collectives of different sizes would end the process instead."""
        if self._group is not None:
            with self.heartbeat.inside("paceline", f"{what}, which all workers have to call,"):
                dist.monitored_barrier(self._group)

    def on_pause(self) -> None:
        """Where all workers pause, as between updates by servers: exchange status at once, and save if due."""
        self._status_exchange.send(self._requests(), 0.0)
        self._received()

    def wants_pause(self) -> bool:
        """Whether this worker requests a checkpoint, and could write it now, or the end. No collective."""
        return self._stopping.is_wanted() or (self._checkpoints is not None and self._checkpoints.wants_save)

    def next_save(self) -> float:
        """The number of the next step that is saved in any case; infinite if none is. No collective."""
        return math.inf if self._checkpoints is None else self._checkpoints.next_save(self.state.progress.steps)

    def epoch_ended(self) -> None:
        """Before the first step of the next epoch: save if that is due now. A collective."""
        if self._checkpoints is not None:
            self._received()
            self._checkpoints.epoch_ended()
            self.on_pause()

    def when_saved(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called with the step of each complete checkpoint, on all workers after the same step."""
        if self._checkpoints is not None:
            self._checkpoints.was_saved = tell

    def save(self) -> None:
        """Save the state as it is now, unless that is done. A collective."""
        if self._checkpoints is not None:
            self._checkpoints.save(self.state.progress.steps, self.state.metrics)

    @property
    def newest_checkpoint(self) -> str | None:
        """The address of the newest checkpoint, or that there is none; None: the run saves none."""
        if self._checkpoints is None:
            return None
        newest = self._checkpoints.newest
        return "none was written" if newest is None else newest[1]

    def finish(self, *, is_between_epochs: bool) -> None:
        """At the end of training: save any unsaved state.

        Args:
            is_between_epochs: whether the script has taken all batches of the last epoch. One that has left its loop
                before has not come to the epoch's end.
        """
        self._status_exchange.received()  # no message stays in flight
        if self._checkpoints is not None:
            if is_between_epochs:
                self.state.progress.leave_epoch()
            self._checkpoints.save(self.state.progress.steps)
            self._checkpoints.wait()
        if self.peers is not None:
            self.peers.close()

    def check_peers(self, *, has_waited: bool = False) -> None:
        """Before an update of weights and optimizer; as `PeerWatch.check` where there is one."""
        if self.peers is not None:
            self.peers.check(has_waited=has_waited)

    def rescue(self, *, is_whole: bool) -> None:
        """After an error: save this worker's state, without the others, which may be gone.

        Args:
            is_whole: whether the state is consistent: the error did not come in the middle of an update.
        """
        if self._checkpoints is not None:
            self.heartbeat.save()  # the launcher lets it finish before it ends this worker
            self._checkpoints.rescue(is_whole=is_whole)

    def close(self) -> None:
        """Stop saving; the checkpoint in progress is finished."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._held.close()


def _worker_names(plan: Plan) -> list[str]:
    """The display name of each worker, by rank."""
    hostnames = [placed.hostname for placed in plan.placements for _ in range(placed.num_workers)]
    return [f"Worker {rank}" + (f" on {hostname}" if hostname else "") for rank, hostname in enumerate(hostnames)]
