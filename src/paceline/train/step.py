"""The steps of a run: which model a step trains, its batch and gradients, the checks, the update; and what is done when
all steps on a batch are made (status exchange, checkpoint)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.data import Loading, Purpose, SampleRequest
from paceline.data.randomness import key
from paceline.errors import JobError, ModelError, PeerLost
from paceline.heartbeat import beat
from paceline.object_collectives import all_gather_objects
from paceline.parallel import Assignment, Companions, StepInput
from paceline.parallel.fused import check_fused, fused
from paceline.parallel.layout import clip_gradients
from paceline.parallel.losses import StepLoss
from paceline.parallel.pass_state import host_states, seed_generators, torch_states
from paceline.parallel.step_input import AnyShard, frozen_models
from paceline.spec import Mesh
from paceline.tensors import Apply, Batch, is_dtensor, local_shard, map_tensors
from paceline.train.batches import GlobalBatch, GlobalBatches
from paceline.train.meters import StepTimer
from paceline.train.model_state import LossFn, Trained
from paceline.train.optim import FUSED, parts_of
from paceline.train.session import Session
from paceline.words import and_more

_AUDITED_STEPS = 2
"""So many steps of a run are audited, the last one of each epoch, and those before checkpoints every so many steps."""


@dataclass
class PendingBatch:
    """A batch that was read and is to be trained on."""

    batch: GlobalBatch
    content: Batch
    """This worker's samples of it."""
    loading: Loading
    index: int
    """The number of batches trained on before it, over the whole run."""
    samples_seen: int
    """The samples of all workers in these."""
    num_steps: int = 0
    """The steps made on it so far."""


class UpdateRecorder(Protocol):
    """What is told of every update of a run."""

    def before_update(self, trained: Trained, loss: Tensor, batch: Batch | None) -> None:
        """The gradients are complete; `loss` is a scalar. None: another worker counts this one's samples. Called by all
        workers, so that it may make collectives."""

    def after_update(self, trained: Trained) -> None:
        """Called by all workers."""

    def close(self) -> None:
        """The run has ended, or failed."""


@dataclass(frozen=True)
class TrainingStep:
    """What one step trains, and on what."""

    trained: Trained
    guard: NonFiniteGuard
    pending: PendingBatch
    content: Batch
    """`pending.content` as the script passed it to `step`."""
    loss_fn: LossFn
    optimizer: Optimizer
    """The one that makes the update: the model's, or one of several."""


class Stepper:
    """Makes the steps of a run: one for each batch, or several where the script names the model of each.

    Progress counts batches: the first step on one counts it as trained on, the run is saved when the script asks for
    the next one, and a failure in between leaves the checkpoint before.
    """

    def __init__(
        self,
        session: Session,
        mesh: Mesh,
        timer: StepTimer,
        batches: GlobalBatches,
        recorder: UpdateRecorder | None,
    ) -> None:
        self.session = session
        self._state, self._job = session.state, session.state.job
        self._device = session.world.device
        self._timer, self._batches, self._recorder = timer, batches, recorder
        self._guards: dict[str, NonFiniteGuard] = {}
        self._is_sharded = mesh.fsdp > 1
        """Whether workers with other samples hold parts of one model, which they have to call together."""
        # Workers that compute other layers of a model have the same samples: one of them counts them.
        self._counts_samples = mesh.leads_assignment(session.world.rank)
        self._is_finished = True
        """Whether the script has done what belongs to the last batch."""
        self._may_go_on = False
        """Whether the script may make more steps on the last batch."""
        self._is_between_epochs = False
        """Whether the script has taken all batches of an epoch, and may be at what it does at the epoch's end."""
        self._pending: PendingBatch | None = None
        """The batch that the script has."""

    def add(self, name: str, trained: Trained) -> None:
        """Add a model to those that `step` can train."""
        self._guards[name] = NonFiniteGuard(self.session, trained)

    # --- batches ---

    def batches(self, loading: Loading, epoch: int, samples_per_epoch: int | None) -> Iterator[Batch]:
        """This worker's shards of each global batch that remains of an epoch; `step` is to be called with each.

        What the script does after the last one belongs to the epoch's end. A collective. Raises `JobError` where a
        batch had no step, as one of another data set that is read at the same time.
        """
        self._pending, progress = None, self._state.progress
        self.catch_up()
        self.finish_step()
        self._is_between_epochs = False
        self.session.begin()
        if not progress.is_over(epoch):
            is_read = self._state.models.first.engine.reads_assignment
            batches = self._batches.of_epoch(loading, epoch, samples_per_epoch, reads_assignment=is_read)
            if progress.steps and progress.at_epoch_start:
                self.session.epoch_ended()
            self._timer.resume()
            self._timer.data_asked()
            for batch, content in batches:
                self._timer.data_arrived()
                content = replace(content, apply=self._apply_of(batch))
                pending = PendingBatch(batch, content, loading, progress.steps, progress.samples_seen)
                self._pending = pending
                yield content
                if not pending.num_steps:
                    raise JobError(
                        "Every batch from run.batches needs its run.step before the next one is taken; a run reads one "
                        "data set at a time: put two into one, as torch.utils.data.StackDataset(…) does."
                    )
                self._pending = None
                self.finish_step()
                if progress.steps_left == 0:
                    break
                self._timer.data_asked()
        self._is_between_epochs = True
        if progress.steps_left == 0 and (epoch != progress.epoch or progress.epochs_done is None):
            # Saved in the middle of an epoch, too: what the script does at its end, such as an evaluation that may stop
            # the training early, comes later for a run that goes on.
            progress.leave_epoch()  # of which the end has been, if the script asks for the next one
            self.session.save()

    def _apply_of(self, batch: GlobalBatch) -> Apply:
        """What `Batch.map` does: call a function with each shard of this worker's, under the shard's seed.

        Workers that hold parts of a model, which the function may call, call it equally often: those with fewer shards
        than others for copies of their first one as well, which count for nothing.
        """
        step = self._state.progress.steps
        of_workers = batch.assignment.shards_of_rank if self._is_sharded else ()
        num_calls = max((stop - start for start, stop in of_workers), default=0)
        calls = itertools.count()

        def apply(function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
            every = shards + tuple(map_tensors(shards[0], torch.clone) for _ in range(len(shards), num_calls))
            own_seed = key(self._job.seed, Purpose.IN_LOOP, next(calls), step)
            made = []
            for shard, content in enumerate(every, batch.assignment.own[0]):
                seed_generators(key(own_seed, Purpose.IN_LOOP, step, shard), self._device)
                made.append(function(content))
            seed_generators(key(own_seed, Purpose.IN_LOOP, step, -1), self._device)
            return tuple(made[: len(shards)])

        return apply

    def finish_step(self) -> None:
        """Exchange status and save if due, once the script has done what belongs to the last batch. A collective.

        A learning-rate scheduler or an average of weights moves after `Run.step`: saved inside of it, they would be
        one step behind the weights.
        """
        if not self._is_finished:
            self._is_finished = True
            # What a script draws from now on is what it draws after a resume, whatever one worker drew for its log.
            self.session.seed_between_steps()
            if all(trained.engine.is_synchronised for trained in self._state.models.by_name.values()):
                self.session.step_ended(self._timer.own_s)

    def catch_up(self) -> None:
        """Have all that the device knows of the steps so far known to the host, and said; waits for the device."""
        for guard in self._guards.values():
            guard.catch_up()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context in which the run can be saved as it is: the last step is complete."""
        before, self._is_finished = self._is_finished, True
        yield
        self._is_finished = before

    def end(self, error: BaseException | None) -> PeerLost | None:
        """After the last step, save; after an error, save what is whole without the others, and return the loss of a
        worker that led to it, if one did."""
        if error is None:
            self.catch_up()
            self.session.finish(is_between_epochs=self._is_between_epochs)
        if not isinstance(error, Exception | KeyboardInterrupt):
            return None
        state, is_whole = self._state, self.session.is_consistent
        with contextlib.suppress(RuntimeError):  # of a device that is of no more use
            self.catch_up()
        lost = self.session.cause_of(error)
        if not self._is_finished or self._is_between_epochs:
            # A part of the state, as of the script's own, may be of the batch before, or of the next epoch.
            try:
                is_whole &= not (self._may_go_on or state.kept.moves_between_steps or state.models.changed_frozen())
            except RuntimeError:
                is_whole = False
        self.session.rescue(is_whole=is_whole)
        return lost

    # --- a step ---

    def step(
        self, content: Any, loss_fn: LossFn, model: nn.Module | None, optimizer: Optimizer | None
    ) -> tuple[StepLoss, Trained]:
        """Train one of the models on a batch; returns its loss, and what was trained. Takes what `Run.step` takes."""
        pending, models = self._pending, self._state.models
        if pending is None or (pending.num_steps and model is None and optimizer is None):
            raise JobError(
                "run.step takes a batch that run.batches just yielded, and takes it once unless it says which model it "
                "trains: run.step(batch, loss_fn, model=…). Samples that the script makes itself, such as those of a "
                "replay buffer, come from an IterableDataset: for batch in run.batches(stream)."
            )
        if not isinstance(content, Batch) or content.sizes != pending.content.sizes:
            raise ModelError(
                f"run.step was given a {type(content).__name__} other than the batch that run.batches yielded; give it "
                "that batch, or what its map(function) returns."
            )
        name = self._trained_by(model, optimizer)
        trained = models.by_name[name]
        one = TrainingStep(trained, self._guards[name], pending, content, loss_fn, optimizer or trained.optimizer)
        companions = [companion for other, companion in models.companions.items() if other != name]
        self._may_go_on = model is not None or optimizer is not None
        result = self._train(one, companions)
        pending.num_steps += 1
        if pending.num_steps == 1:
            self._state.progress.trained_on(pending.batch)
            self._state.kept.after_restoring.clear()  # what is restored later leaves alone what steps have changed
        beat(self._state.progress.steps)
        self.session.seed_between_steps(pending.num_steps)
        self._timer.step_ended(trained.engine.communication)
        self.session.is_consistent, self._is_finished = True, False
        return result, trained

    def _trained_by(self, model: nn.Module | None, optimizer: Optimizer | None) -> str:
        """The name of the model that a step trains."""
        by_name = self._state.models.by_name
        found = [
            name
            for name, one in by_name.items()
            if model in (None, one.model) and optimizer in (None, one.optimizer, *parts_of(one.optimizer))
        ]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(by_name)
            raise JobError(f"This run trains several models ({names}); say which: run.step(batch, loss_fn, model=…).")
        what = "model" if optimizer is None else "optimizer"
        raise JobError(f"run.step was given a {what} that run.prepare did not return; give it one that it returned.")

    def _train(self, one: TrainingStep, companions: Companions) -> StepLoss:
        """Train on a batch, with the other models that the loss function may call; returns its loss."""
        trained, pending, batch = one.trained, one.pending, one.pending.batch
        engine = trained.engine
        if engine.changes_state:
            self.session.is_consistent = False
        engine.buffers.begin_step(is_audited=self._is_audited(pending))
        # For asynchronous servers, whose workers read the shards they compute: a stand-in that shows what is returned.
        step_input = self._input(one, pending.index, batch.assignment, one.content)
        if not engine.reads_assignment:
            step_input = replace(step_input, any_shard=self._any_shard(one))
        else:
            is_read_again = self._may_go_on or trained.needs_closure or self._is_audited(pending)
            step_input = replace(step_input, reads_again=is_read_again)
            if trained is self._state.models.first and not pending.num_steps:
                take_norms = self._state.noise.for_step(pending.index, batch.assignment)
                step_input = replace(step_input, take_norms=take_norms)
        step_input = replace(step_input, companions=companions)
        trained.rates.set(pending.samples_seen, batch.samples_per_epoch)
        trained.model.zero_grad()  # of parameters that no optimizer has, too: they count in the norm
        try:
            with frozen_models(companions):
                if self._job.fuse_shards is not None:
                    together = fused(step_input, self._job.fuse_shards)
                    if pending.index == 0:
                        check_fused(engine.passes, step_input, together)
                    step_input = together
                result = engine.step(step_input, functools.partial(self._update, one, step_input))
        except BaseException as problem:
            try:
                engine.buffers.begin_pass()  # the run is whole if the error came before the update
            except RuntimeError:  # the device is of no more use
                self.session.is_consistent = False
            if not isinstance(problem, torch.OutOfMemoryError | MemoryError):
                raise
            words = str(problem).split(". ")[0].strip() or type(problem).__name__
            raise ModelError(
                f"Memory ran out in step {pending.index + 1} ({words}); raise virtual_shards: one shard of "
                f"{self._job.shard_size} samples goes through the model at a time."
            ) from problem
        if self._recorder is not None:
            self._recorder.after_update(trained)
        return result

    def _input(self, one: TrainingStep, index: int, assignment: Assignment, content: Batch) -> StepInput:
        """The step input for an assignment of the global batch with this number, counted over the whole run."""
        precision, seed, nth = one.trained.precision, self._job.seed, one.pending.num_steps
        own_seed = key(seed, Purpose.LATER_STEP, nth, index) if nth else seed  # dropout masks of its own
        return StepInput(
            number=index + 1,
            assignment=assignment,
            batch=content,
            loss_of=precision.of(one.loss_fn),
            shard_seed=lambda shard: key(own_seed, Purpose.FORWARD, index, shard),
            scale=precision.scaler.scale,
            loss_name=loss_name(one.loss_fn),
            is_low_precision=self._job.precision in ("bfloat16", "float16"),
        )

    def _is_audited(self, pending: PendingBatch) -> bool:
        """Whether it is one of the first steps, or one after which a checkpoint is due."""
        is_saved = pending.index + 1 == self.session.next_save() or pending.batch.num_left == 1
        return pending.index < _AUDITED_STEPS or is_saved

    def _update(self, one: TrainingStep, step_input: StepInput, loss: Tensor) -> None:
        """Make an update by the gradients that are in `.grad`, unless they are not finite."""
        trained, optimizer, optim = one.trained, one.optimizer, self._job.optim
        engine, scaler = trained.engine, trained.precision.scaler
        if self._is_audited(one.pending):
            engine.audit(step_input, has_gradients=one.pending.index > 0)
        if optimizer is not trained.optimizer:  # one of several: gradients stay only where it updates
            engine.keep_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])
        # A worker that is alone between two synchronisations may have no sample, hence no gradient and no update. One
        # that holds only a stage of the model may have no parameter, and continues with the others.
        has_gradient = not engine.holds_all or any(p.grad is not None for p in trained.model.parameters())
        is_made, left_out = self._judge(one, loss, engine.gradient_norm, has_gradient)
        if is_made and optim.clip_norm is not None:
            whole = engine.gradient_norm() / scaler.scale(torch.ones((), device=self._device))
            scaler.unscale_(optimizer)
            clip_gradients(trained.model.parameters(), optim.clip_norm, whole)
            if not engine.holds_all and (self._job.nonfinite == "ignore" or scaler.is_enabled()):
                self.session.check_peers()  # the norm was a sum of all workers' too, and the guard has not read it
        self.session.is_consistent = False
        seen = one.content if one.pending.batch.assignment.sizes and self._counts_samples else None
        if self._recorder is not None:
            self._recorder.before_update(trained, loss, seen)
        if is_made:
            with left_out:
                self._make_update(one, step_input)
            return
        if scaler.is_enabled() and has_gradient and self._job.nonfinite == "skip":
            scaler.unscale_(optimizer)  # finds the gradients that are not finite, so that the scale goes down
            scaler.update()
        if engine.weights_diverge:  # other workers make theirs, at the same learning rate
            self._move_schedulers(one)

    def _judge(
        self, one: TrainingStep, loss: Tensor, norm: Callable[[], Tensor], has_gradient: bool
    ) -> tuple[bool, AbstractContextManager[None]]:
        """Whether the update is made, and a context for it in which the device may still leave it out."""
        guard, index, samples = one.guard, one.pending.index, one.pending.batch.samples
        guard.catch_up()
        if not has_gradient:
            self.session.check_peers()
            return False, nullcontext()
        if self._device.type != "cuda" or not guard.may_be_late or not skips_on_device(one.optimizer):
            return guard.allows_update(index, loss, norm, samples), nullcontext()
        return True, skipped_where(one.optimizer, guard.judge_on_device(index, loss, norm, samples))

    def _make_update(self, one: TrainingStep, step_input: StepInput) -> None:
        """Have the optimizer, and the schedulers after it, make their step."""
        trained, optimizer, optim = one.trained, one.optimizer, self._job.optim
        scaler = trained.precision.scaler
        may_draw = any(type(part).__module__.partition(".")[0] != "torch" for part in parts_of(optimizer))
        if may_draw:
            # It may draw random numbers: every worker makes the same update.
            seed = key(self._job.seed, Purpose.UPDATE, one.pending.num_steps, one.pending.index)
            seed_generators(seed, self._device)
        before = (host_states(), torch_states(self._device)) if may_draw and not trained.engine.holds_all else None
        if not trained.needs_closure:
            scaler.step(optimizer)
            scaler.update()
        else:

            def gradients_again() -> Tensor:
                """The step's gradient at the weights as they are now, and its loss."""
                trained.model.zero_grad()
                loss = trained.engine.gradients(replace(step_input, take_norms=None)).loss
                if optim.clip_norm is not None:
                    clip_gradients(trained.model.parameters(), optim.clip_norm, trained.engine.gradient_norm())
                return loss

            optimizer.step(torch.enable_grad()(gradients_again))  # type: ignore[arg-type]
        if before is not None and before != (host_states(), torch_states(self._device)):
            raise ModelError(
                f"{type(optimizer).__name__} draws random numbers for the update, which are others for parts of the "
                "parameters than for all of them; choose the strategy dp."
            )
        self._move_schedulers(one)

    def _move_schedulers(self, one: TrainingStep) -> None:
        for scheduler in one.trained.schedulers:
            if scheduler.optimizer is one.optimizer or one.optimizer is one.trained.optimizer:
                scheduler.step()

    def _any_shard(self, one: TrainingStep) -> AnyShard:
        """The input for asynchronous servers, whose workers read the shards they compute."""
        job, progress, pending, batch = self._job, self._state.progress, one.pending, one.pending.batch
        if batch.index != progress.steps:
            raise JobError(
                f"This run has made {progress.steps} updates, but {batch.index} global batches of "
                f"{job.global_batch_size} come before this one, and asynchronous servers count batches by updates; "
                "train on every batch of every epoch once, with one global_batch_size, or begin in another folder."
            )
        if one.content.shards is not pending.content.shards:
            raise ModelError(
                "With aggregation.method = 'parameter_server_async' workers read the shards they compute themselves, "
                "so what the script changed in a batch before run.step would be lost; do it in the loss function."
            )
        num_batches = progress.order(batch.epoch).num_batches

        def batch_of(index: int) -> GlobalBatch:
            epoch, number = divmod(index, num_batches)
            return progress.batch(epoch, number, num_batches)

        def read(index: int, shard: int) -> StepInput:
            found = batch_of(index)
            assignment = Assignment(found.assignment.shard_sizes, ((shard, shard + 1),), rank=0)
            request = SampleRequest((found.samples[slice(*assignment.span)],), found.number, shard)
            (content,) = self._batches.reader.read_shards(pending.loading, found.epoch, [request])
            # Servers know of no loss scale.
            return replace(self._input(one, index, assignment, content), scale=lambda loss: loss)

        def factor(index: int) -> float:
            per_epoch, found = batch.samples_per_epoch, batch_of(index)
            seen = found.epoch * per_epoch + min(found.number * job.global_batch_size, per_epoch)
            return one.trained.rates.factor(seen, per_epoch)

        def updated(loss: Tensor, is_made: bool) -> None:
            if is_made:
                one.trained.num_nonfinite = 0
            else:
                one.guard.leave_out(batch.index, loss, (), batch.samples)

        return AnyShard(
            batch=batch.index,
            num_shards=lambda index: len(batch_of(index).assignment.shard_sizes),
            lr_factor=factor,
            read=read,
            at_base_rates=one.trained.rates.at_base,
            stop=int(min(progress.steps + batch.num_left, self.session.next_save())),
            wants_pause=self.session.wants_pause,
            on_pause=self.session.on_pause,
            updated=updated,
        )


def loss_name(loss_fn: LossFn) -> str:
    """Where a loss function is written: a name that is the same on all workers, in all steps and after a resume."""
    function: Any = inspect.unwrap(loss_fn)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"


# --- the finiteness check: whether a step's loss and gradients are finite, before they change the weights ---
#
# Either the host waits for the result before the update. Or the check is deferred: the GPU itself skips an update that
# is not finite, and the host reads the result while the next step's gradients are computed. The check is deferred only
# while steps are finite: after a skipped step the host waits for it until a step is finite again, so that a run ends in
# the same step either way.

MOST_IN_A_ROW = 10
"""The run ends after this many consecutive steps without an update."""

_SHOWN_SAMPLES = 8


class NonFiniteGuard:
    """Looks at the loss and gradients of every step before they become an update."""

    def __init__(self, session: Session, trained: Trained) -> None:
        self._session = session
        self._trained = trained
        self._reaction = session.state.job.nonfinite
        trained.catch_up = self.catch_up
        self._late: Callable[[], None] | None = None
        """Reads the result of a check on the GPU, which has made or skipped the update."""

    @property
    def may_be_late(self) -> bool:
        """Whether the next check may be deferred.

        It may not if a step that is not finite has other effects than a skipped update, workers hold shards of the
        gradient, or the host has to wait anyway: for news of lost workers, a loss scale, or schedulers of the script,
        which move only after an update that was made.
        """
        trained = self._trained
        is_plain = not (trained.needs_closure or trained.schedulers or trained.precision.scaler.is_enabled())
        is_alone = trained.engine.holds_all and self._session.peers is None
        return self._reaction == "skip" and not trained.num_nonfinite and is_plain and is_alone

    def allows_update(self, step: int, loss: Tensor, norm: Callable[[], Tensor], samples: NDArray[Any]) -> bool:
        """Whether to make the update after `step` others; the same answer on all workers that aggregate every step.

        `norm` returns the norm of the whole model's gradient, a scalar; a collective if workers hold shards. Raises
        `ModelError` where the run is to end because of this step, `PeerLost` where a worker is gone.
        """
        is_ignored = self._reaction == "ignore"
        # The scaler skips a step that overflows under its loss scale, and scales less.
        loss_alone = self._trained.precision.scaler.is_enabled()
        found = [loss] if loss_alone or is_ignored else [loss, norm().to(loss)]
        is_good = is_ignored or bool(torch.stack(found).isfinite().all())
        self._session.check_peers(has_waited=not is_ignored)
        if is_good:
            self._trained.num_nonfinite = 0
            return True
        parameters = self._trained.model.named_parameters()
        gradients = {name: local_shard(p.grad) for name, p in parameters if p.grad is not None}
        culprits = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        if not self._trained.engine.holds_all:
            of_all = set().union(*all_gather_objects(culprits, self._session.world.group))
            culprits = [name for name in self._trained.names.first if name in of_all]  # in the model's order
        self.leave_out(step, loss, culprits, samples)
        return False

    def leave_out(self, step: int, loss: Tensor, culprits: Sequence[str], samples: NDArray[Any]) -> None:
        """React to a step whose loss or gradient is not finite, and that makes no update. Raises `ModelError` where the
        run is to end because of this step."""
        num_in_a_row = self._trained.num_nonfinite + 1
        wrong = _describe(step, loss, culprits, samples)
        if self._reaction == "stop":
            raise ModelError(f"{wrong}. The run ends, as nonfinite = 'stop' says; lower optim.lr or look at the data.")
        if num_in_a_row >= MOST_IN_A_ROW:
            raise ModelError(f"{wrong}. That is the {MOST_IN_A_ROW}th in a row; lower optim.lr or look at the data.")
        if self._reaction == "skip":
            self._session.say(f"{wrong}. The step is skipped.")
        elif (checkpoint := self._session.roll_back()) is not None:
            self._session.say(f"{wrong}. Weights and optimizer are again those of {checkpoint}; the data goes on.")
        else:
            raise ModelError(f"{wrong}. There is no checkpoint yet to go back to; lower optim.lr or look at the data.")
        self._trained.num_nonfinite = num_in_a_row  # a step that ends the run is not made, and repeated by a resume

    def judge_on_device(self, step: int, loss: Tensor, norm: Callable[[], Tensor], samples: NDArray[Any]) -> Tensor:
        """1 if the update is to be skipped, else 0: a float32 scalar on the device. The host reads it in `catch_up`.
        Only for steps whose check `may_be_late`."""
        found = torch.stack([loss, norm().to(loss)])
        in_host_memory = found.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> None:
            arrived.synchronize()  # of a step whose work is followed by that of the next
            if not in_host_memory.isfinite().all():
                self._trained.num_nonfinite += 1
                self._session.say(f"{_describe(step, in_host_memory[0], (), samples)}. The step is skipped.")

        self._late = read
        return (~found.isfinite()).any().float()

    def catch_up(self) -> None:
        """Read the result of the last step's check if it is pending, and tell the user if its update was skipped."""
        late, self._late = self._late, None
        if late is not None:
            late()


def _describe(step: int, loss: Tensor, culprits: Sequence[str], samples: NDArray[Any]) -> str:
    """What is not finite in step `step`, and the numbers of the samples in its batch."""
    what = [] if bool(torch.isfinite(loss)) else [f"the loss is {float(loss)}"]
    if not what and not culprits:
        what.append("the norm of the gradient is not finite")
    if culprits:
        what.append(f"the gradient of '{culprits[0]}'{and_more(len(culprits) - 1)} is not finite")
    shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES].tolist()))
    rest = and_more(len(samples) - _SHOWN_SAMPLES)
    return f"Step {step + 1}: {' and '.join(what)}; its batch is samples {shown}{rest}"


# --- updates that the device leaves out by itself, as torch's fused kernels do ---


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the next update can be left out without the host, so that nothing of the optimizer changes.

    Not the first update of a parameter: its state would then be there, and torch's SGD takes what lies in memory for
    the momentum of the second one.
    """
    for one in parts_of(optimizer):
        if type(one) not in FUSED or not all(group.get("fused") for group in one.param_groups):
            return False
        has_state = not isinstance(one, SGD) or any(group["momentum"] for group in one.param_groups)
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            is_new = has_state and parameter.grad is not None and not one.state.get(parameter)
            if is_new or is_dtensor(parameter):  # torch's kernels take no shards of the flag
                return False
    return True


@contextmanager
def skipped_where(optimizer: Optimizer, is_bad: Tensor) -> Iterator[None]:
    """A context in which an optimizer that `skips_on_device` updates where `is_bad`, a float32 scalar, is 0, not 1."""
    for one in parts_of(optimizer):
        one.found_inf = is_bad  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for one in parts_of(optimizer):
            del one.found_inf  # type: ignore[attr-defined]
