"""The steps of a run: selects the model that a step trains, and finishes the batch (status exchange, checkpoint)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.batch import Apply
from paceline.containers import copied
from paceline.data import Loading
from paceline.errors import JobError, PeerLost
from paceline.parallel import Companions
from paceline.parallel.losses import StepLoss
from paceline.spec import Mesh
from paceline.train.batches.data_progress import GlobalBatch
from paceline.train.batches.reading import DatasetReader
from paceline.train.optimizers.optim import parts_of
from paceline.train.process.numerics import LossFn
from paceline.train.process.seeding import seed_between_steps, seed_map
from paceline.train.records.timing import StepTimer
from paceline.train.session.session import Session
from paceline.train.session.state import Trained
from paceline.train.steps.model_step import ModelStepper, Pending
from paceline.train.steps.preparation import Prepared
from paceline.train.steps.trace import ParityTracer

_EPOCH_IS_OVER = (
    "Epoch {} was over when this run was saved, and has no batches now; take the numbers of epochs from run.epochs(), "
    "or what the script does at the end of an epoch is done again."
)


class Stepper:
    """Makes the steps of a run: one for each batch, or several where the script names the model of each.

    Progress counts batches: the first step on one counts it as trained on, the run is saved when the script asks for
    the next one, and a failure in between leaves the checkpoint before.
    """

    def __init__(self, session: Session, timer: StepTimer) -> None:
        self.session = session
        self._state = session.state
        self._device = session.world.device
        self._timer = timer
        self._steppers: dict[str, ModelStepper] = {}
        self._is_sharded = False
        """Whether workers with other samples hold parts of one model, which they have to call together."""
        self._is_finished = True
        """Whether the script has done what belongs to the last batch."""
        self._may_go_on = False
        """Whether the script may make more steps on the last batch."""
        self._is_between_epochs = False
        """Whether the script has taken all batches of an epoch, and may be at what it does at the epoch's end."""
        self._has_told_of_epochs = False
        """Whether the script was told that it ends epochs again."""
        self._pending: Pending | None = None
        """The batch that the script has, while the iterator that gave it waits."""

    def add(self, name: str, prepared: Prepared, mesh: Mesh, reader: DatasetReader, tracer: ParityTracer) -> None:
        """Add a model to those that `step` can train."""
        self._is_sharded = mesh.fsdp > 1
        self._steppers[name] = ModelStepper(prepared, self.session, mesh, reader, tracer)

    def _trained_by(self, model: nn.Module | None, optimizer: Optimizer | None) -> tuple[str, Optimizer]:
        """The name of the model that a step trains, and the optimizer that updates it."""
        found = [
            (name, chosen)
            for name, stepper in self._steppers.items()
            if model in (None, stepper.trained.model) and (chosen := _chosen(stepper.trained, optimizer)) is not None
        ]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(self._steppers)
            raise JobError(f"This run trains several models ({names}); say which: run.step(batch, loss_fn, model=…).")
        what = "model" if optimizer is None else "optimizer"
        raise JobError(f"run.step was given a {what} that run.prepare did not return; give it one that it returned.")

    def step(
        self, pending: Pending, content: Any, loss_fn: LossFn, model: nn.Module | None, optimizer: Optimizer | None
    ) -> tuple[StepLoss, Trained]:
        """Train one of the models on a batch; returns its loss, and what was trained.

        Args:
            content: `pending.content` as the script passed it to `step`.
        """
        name, chosen = self._trained_by(model, optimizer)
        stepper, progress = self._steppers[name], self._state.progress
        companions = Companions([one for other, one in self._state.models.companions.items() if other != name])
        result = stepper.step(pending, content, loss_fn, companions, chosen)
        pending.num_steps += 1
        if pending.num_steps == 1:
            progress.trained_on(pending.batch)
        self.session.heartbeat.step(progress.steps)
        self._may_go_on = model is not None or optimizer is not None
        seed = self._state.job.seed
        seed_between_steps(seed, progress.steps, self._device, pending.num_steps)
        self._timer.step_ended(stepper.trained.engine.communication)
        self.session.is_consistent, self._is_finished = True, False
        return result, stepper.trained

    @contextlib.contextmanager
    def given(self, batch: GlobalBatch, content: Any, loading: Loading) -> Iterator[Pending]:
        """A context in which the script has a batch, which it is to make a step on."""
        progress = self._state.progress
        content = replace(content, apply=self._apply_of(batch))
        try:
            self._pending = Pending(batch, content, loading, progress.steps, progress.samples_seen)
            yield self._pending
        finally:
            self._pending = None

    def _apply_of(self, batch: GlobalBatch) -> Apply:
        """What `Batch.map` does: call a function with each shard of this worker's, under the shard's seed.

        Workers that hold parts of a model, which the function may call, call it equally often: those with fewer shards
        than others for copies of their first one as well, which count for nothing.
        """
        seed, index = self._state.job.seed, self._state.progress.steps
        of_workers = batch.assignment.shards_of_rank if self._is_sharded else ()
        num_calls = max((stop - start for start, stop in of_workers), default=0)
        numbers = itertools.count()

        def apply(function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
            every = shards + tuple(copied(shards[0]) for _ in range(len(shards), num_calls))
            made, number = [], next(numbers)
            for shard, content in enumerate(every, batch.assignment.own[0]):
                seed_map(seed, index, number, shard, self._device)
                made.append(function(content))
            seed_map(seed, index, number, -1, self._device)
            return tuple(made[: len(shards)])

        return apply

    def catch_up(self) -> None:
        """Have all that the device knows of the steps so far known to the host, and said; waits for the device."""
        for stepper in self._steppers.values():
            stepper.guard.catch_up()

    def begin_epoch(self) -> None:
        """Before the first batch of an epoch: all models of the run are known.

        Raises:
            JobError: the script reads batches of another data set at the same time.
        """
        if self._pending is not None and not self._pending.num_steps:
            raise JobError(
                "run.batches was called before the batch of another run.batches had its run.step; a run reads one data "
                "set at a time: put two into one, as torch.utils.data.StackDataset(labelled=…, unlabelled=…) does."
            )
        self.catch_up()
        self.finish_step()
        self._is_between_epochs = False
        self.session.begin()

    def batches_ended(self, epoch: int) -> None:
        """The script has taken all batches of an epoch: what it does now belongs to the epoch's end. A collective.

        In the middle of an epoch the run is saved here: what the script does at the end of an epoch, such as an
        evaluation that may stop the training early, comes later for a run that goes on.
        """
        self._is_between_epochs = True
        progress = self._state.progress
        is_next = epoch != progress.epoch
        if progress.steps_left == 0 and (is_next or progress.epochs_done is None):
            progress.leave_epoch()  # of which the end has been, if the script asks for the next one
            self.session.save()
        elif is_next and not self._has_told_of_epochs:
            self._has_told_of_epochs = True
            self.session.note(_EPOCH_IS_OVER.format(epoch))

    def finish_step(self) -> None:
        """Exchange status and save if due, once the script has done what belongs to the last batch. A collective.

        A learning-rate scheduler or an average of weights moves after `Run.step`: saved inside of it, they would be
        one step behind the weights.
        """
        if not self._is_finished:
            self._is_finished = True
            # What a script draws from now on is what it draws after a resume, whatever one worker drew for its log.
            seed_between_steps(self._state.job.seed, self._state.progress.steps, self._device)
            if all(stepper.trained.engine.is_synchronised for stepper in self._steppers.values()):
                self.session.step_ended(self._timer.own_s)

    def end(self, error: BaseException | None) -> PeerLost | None:
        """After the last step, save; after an error, save what is whole without the others.

        Returns:
            The loss of a worker that led to the error; None if none did.
        """
        if error is None:
            self.catch_up()
            self.session.finish(is_between_epochs=self._is_between_epochs)
        if not isinstance(error, Exception | KeyboardInterrupt):
            return None
        with contextlib.suppress(RuntimeError):  # of a device that is of no more use
            self.catch_up()
        lost = None if self.session.peers is None else self.session.peers.cause_of(error)
        is_at_rest = self._is_finished and not self._is_between_epochs
        self.session.rescue(is_whole=self.session.is_consistent and (is_at_rest or not self._may_miss_some()))
        return lost

    def _may_miss_some(self) -> bool:
        """Whether a part of the state, as of the script's own, may be of the batch before, or of the next epoch."""
        state = self._state
        try:
            return self._may_go_on or state.kept.moves_between_steps or bool(state.models.changed_frozen())
        except RuntimeError:  # of a device that is of no more use
            return True

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context in which the run can be saved as it is: the last step is complete."""
        before, self._is_finished = self._is_finished, True
        yield
        self._is_finished = before


def _chosen(trained: Trained, optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer of a step: the model's own, or one of several in it; None if it is neither."""
    whole = trained.optimizer
    if optimizer in (None, whole):
        return whole
    return optimizer if optimizer in parts_of(whole) else None
