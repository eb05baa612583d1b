"""One training step of one model, from a batch to an update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.batch import Batch
from paceline.containers import tensors
from paceline.data import Loading, SampleRequest
from paceline.errors import JobError, ModelError
from paceline.parallel import Assignment, Companions, StepInput
from paceline.parallel.assignment import shard_sizes
from paceline.parallel.fused import check_fused, fused
from paceline.parallel.generators import generator_states
from paceline.parallel.losses import StepLoss
from paceline.parallel.out_of_memory import is_out_of_memory
from paceline.parallel.step_input import AnyShard
from paceline.spec import Mesh
from paceline.train.batches.data_progress import GlobalBatch
from paceline.train.batches.reading import DatasetReader
from paceline.train.optimizers.optim import clip, needs_closure, parts_of
from paceline.train.optimizers.schedule import lr_factor
from paceline.train.process.numerics import LossFn, loss_name
from paceline.train.process.seeding import seed_update, shard_seed
from paceline.train.session.session import Session
from paceline.train.steps.nonfinite import NonFiniteGuard, left_out_where, skips_on_device, spoil_gradients_where
from paceline.train.steps.preparation import Prepared
from paceline.train.steps.trace import ParityTracer

_AUDITED_STEPS = 2
"""So many steps of a run are audited, the last one of each epoch, and those before checkpoints every so many steps."""


@dataclass
class Pending:
    """A batch that was read and is to be trained on."""

    batch: GlobalBatch
    content: Any
    """This worker's samples of it."""
    loading: Loading
    index: int
    """The number of batches trained on before it, over the whole run."""
    samples_seen: int
    """The samples of all workers in these."""
    num_steps: int = 0
    """The steps made on it so far."""


class ModelStepper:
    """Makes the steps of one prepared model."""

    def __init__(
        self, prepared: Prepared, session: Session, mesh: Mesh, reader: DatasetReader, tracer: ParityTracer
    ) -> None:
        self.session = session
        self.trained = prepared.trained
        self._state = session.state
        self._device = session.world.device
        self._rates = prepared.rates
        self._schedulers = prepared.schedulers
        # Workers that compute other layers of a model have the same samples: one of them counts them.
        self._counts_samples = mesh.leads_assignment(session.world.rank)
        self._reader = reader
        self._tracer = tracer
        self.guard = NonFiniteGuard(session, self.trained)
        self._needs_closure = needs_closure(self.trained.optimizer, self.trained.engine, session.state.job)

    def step(
        self, pending: Pending, content: Any, loss_fn: LossFn, companions: Companions, optimizer: Optimizer
    ) -> StepLoss:
        """Train on a batch; returns its loss.

        Args:
            content: `pending.content` as the script passed it to `step`.
            companions: the other models that the loss function may call.
            optimizer: the one that makes the update: the model's, or one of several.
        """
        trained, batch = self.trained, pending.batch
        engine = trained.engine
        if not isinstance(content, Batch) or content.sizes != pending.content.sizes:
            raise ModelError(
                f"run.step was given a {type(content).__name__} other than the batch that run.batches yielded; give it "
                "that batch, or what its map(function) returns."
            )
        if engine.changes_state:
            self.session.is_consistent = False
        engine.buffers.begin_step()
        if engine.reads_assignment:
            step_input = self._input(pending, pending.index, batch.assignment, content, loss_fn)
            step_input = replace(step_input, reads_again=self._is_audited(pending) or self._needs_closure)
            if trained is self._state.models.first and not pending.num_steps:
                take_norms = self._state.noise.for_step(pending.index, batch.assignment)
                step_input = replace(step_input, take_norms=take_norms)
        else:
            # A stand-in that shows what the loss function returns; workers read the shards they compute.
            step_input = self._input(pending, pending.index, batch.assignment, pending.content, loss_fn)
            step_input = replace(step_input, any_shard=self._any_shard(pending, content, loss_fn))
        step_input = replace(step_input, companions=companions)
        self._rates.set(pending.samples_seen, batch.samples_per_epoch)
        trained.model.zero_grad()  # of parameters that no optimizer has, too: they count in the norm

        try:
            with companions.unchanged():
                step_input = self._fused(step_input, is_first=pending.index == 0)
                result = engine.step(
                    step_input, functools.partial(self._update, pending, content, step_input, optimizer)
                )
        except BaseException as problem:
            self._restore_buffers()
            if not is_out_of_memory(problem):
                raise
            raise ModelError(self._out_of_memory(pending, problem)) from problem

        self._tracer.after_update(trained.model, engine.whole)
        return result

    def _fused(self, step_input: StepInput, *, is_first: bool) -> StepInput:
        """The step with shards put together, if the job says so; the first is compared with the shards themselves."""
        most_samples, engine = self._state.job.fuse_shards, self.trained.engine
        if most_samples is None:
            return step_input
        if not engine.holds_all:
            raise JobError("fuse_shards needs workers that hold the whole model; leave it out, or use the strategy dp.")
        together = fused(step_input, most_samples)
        if is_first:
            check_fused(engine.passes, step_input, together)
        return together

    def _restore_buffers(self) -> None:
        """After an error: the run is whole if it came before the update."""
        try:
            self.trained.engine.buffers.start_over()
        except RuntimeError:  # the device is of no more use
            self.session.is_consistent = False

    def _out_of_memory(self, pending: Pending, problem: BaseException) -> str:
        words = str(problem).split(". ")[0].strip() or type(problem).__name__
        return (
            f"Memory ran out in step {pending.index + 1} ({words}); raise virtual_shards: one shard of "
            f"{self._state.job.shard_size} samples goes through the model at a time."
        )

    def _input(self, pending: Pending, index: int, assignment: Assignment, content: Any, loss_fn: LossFn) -> StepInput:
        """The step input for an assignment of the global batch with this number, counted over the whole run."""
        precision, seed, nth = self.trained.precision, self._state.job.seed, pending.num_steps
        return StepInput(
            assignment=assignment,
            batch=content,
            loss_of=precision.of(loss_fn),
            shard_seed=lambda shard: shard_seed(seed, index, shard, nth),
            scale=precision.scaler.scale,
            within=precision.autocast,
            loss_name=loss_name(loss_fn),
            is_low_precision=self._state.job.precision in ("bfloat16", "float16"),
        )

    def _is_audited(self, pending: Pending) -> bool:
        """Whether it is one of the first steps, or one after which a checkpoint is due."""
        is_saved = pending.index + 1 == self.session.next_save() or pending.batch.num_left == 1
        return pending.index < _AUDITED_STEPS or is_saved

    def _update(
        self, pending: Pending, content: Any, step_input: StepInput, optimizer: Optimizer, loss: Tensor
    ) -> None:
        """Make an update by the gradients that are in `.grad`, unless they are not finite."""
        trained, optim = self.trained, self._state.job.optim
        if self._is_audited(pending):
            trained.engine.audit(step_input)
        engine, scaler = trained.engine, trained.precision.scaler
        if optimizer is not trained.optimizer:
            self._forget_others(optimizer)
        # A worker that is alone between two synchronisations may have no sample, hence no gradient and no update. One
        # that holds only a stage of the model may have no parameter, and continues with the others.
        has_gradient = not engine.holds_all or any(p.grad is not None for p in trained.model.parameters())
        norm = functools.cache(engine.gradient_norm)  # computed at most once per step
        is_made, left_out = self._judge(pending, optimizer, loss, norm, has_gradient)
        if is_made and optim.clips:
            whole = norm() / scaler.scale(torch.ones((), device=self._device))
            scaler.unscale_(optimizer)
            clip(optim, trained.model.parameters(), lambda: whole)
            if not engine.holds_all and not self.guard.needs_norm:
                self.session.check_peers()  # the norm was a sum of all workers' too
        self.session.is_consistent = False
        idle = not pending.batch.assignment.sizes or not self._counts_samples
        self._tracer.before_update(trained.model, trained.optimizer, engine.whole, loss, content, idle=idle)
        if not is_made:
            if scaler.is_enabled() and has_gradient and self._state.job.nonfinite == "skip":
                # As where the device leaves the update out: the scale goes down.
                spoil_gradients_where(optimizer, torch.ones_like(loss))
                scaler.unscale_(optimizer)
                scaler.update()
            if engine.weights_diverge:  # other workers make theirs, at the same learning rate
                self._move_schedulers(optimizer)
            return
        with left_out:
            self._make_update(pending, step_input, optimizer)

    def _judge(
        self,
        pending: Pending,
        optimizer: Optimizer,
        loss: Tensor,
        norm: Callable[[], Tensor],
        has_gradient: bool,
    ) -> tuple[bool, AbstractContextManager[None]]:
        """Whether the update is made, and a context for it in which the device may still leave it out."""
        batch, left_out = pending.batch, nullcontext()
        self.guard.catch_up()
        if not has_gradient:
            self.session.check_peers()
            return False, left_out
        if not self._knows_late(optimizer):
            return self.guard.allows_update(pending.index, loss, norm, batch.samples), left_out
        is_bad = self.guard.judge_on_device(pending.index, loss, batch.samples)
        if not self.trained.precision.scaler.is_enabled():
            return True, left_out_where(optimizer, is_bad)
        spoil_gradients_where(optimizer, is_bad)
        return True, left_out

    def _make_update(self, pending: Pending, step_input: StepInput, optimizer: Optimizer) -> None:
        """Have the optimizer, and the schedulers after it, make their step."""
        trained = self.trained
        engine, scaler = trained.engine, trained.precision.scaler
        may_draw = any(type(one).__module__.partition(".")[0] != "torch" for one in parts_of(optimizer))
        if may_draw:
            seed_update(self._state.job.seed, pending.index, self._device, pending.num_steps)
        before = None if engine.holds_all or not may_draw else generator_states(self._device)
        if self._needs_closure:
            again = functools.partial(self._gradients_again, step_input)
            optimizer.step(torch.enable_grad()(again))  # type: ignore[arg-type]
        else:
            scaler.step(optimizer)
            scaler.update()
        if before is not None and before != generator_states(self._device):
            raise ModelError(
                f"{type(optimizer).__name__} draws random numbers for the update, which are others for parts of the "
                "parameters than for all of them; choose the strategy dp."
            )
        self._move_schedulers(optimizer)

    def _move_schedulers(self, optimizer: Optimizer) -> None:
        for scheduler in self._schedulers:
            if scheduler.optimizer is optimizer or optimizer is self.trained.optimizer:
                scheduler.step()

    def _knows_late(self, optimizer: Optimizer) -> bool:
        """Whether the device alone decides on this update; the host learns it a step later. Schedulers of the script
        move only after an update that was made."""
        is_possible = self._device.type == "cuda" and self.guard.may_be_late and not self._needs_closure
        return is_possible and not self._schedulers and skips_on_device(optimizer)

    def _forget_others(self, optimizer: Optimizer) -> None:
        """Leave gradients only where `optimizer`, one of several, updates."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in self.trained.model.parameters():
            if id(parameter) not in mine:
                parameter.grad = None

    def _gradients_again(self, step_input: StepInput) -> Tensor:
        """Compute the step's gradient at the weights as they are now; returns its loss."""
        trained = self.trained
        trained.model.zero_grad()
        loss = trained.engine.gradients(replace(step_input, take_norms=None)).loss
        clip(self._state.job.optim, trained.model.parameters(), trained.engine.gradient_norm)
        return loss

    def _any_shard(self, pending: Pending, content: Any, loss_fn: LossFn) -> AnyShard:
        """The input for asynchronous servers, whose workers read the shards they compute."""
        job, progress, batch = self._state.job, self._state.progress, pending.batch
        if batch.index != progress.steps:
            raise JobError(
                f"This run has made {progress.steps} updates, but {batch.index} global batches of "
                f"{job.global_batch_size} come before this one, and asynchronous servers count batches by updates; "
                "train on every batch of every epoch once, with one global_batch_size, or begin in another folder."
            )
        before, now = ([id(tensor) for tensor in tensors(one.shards)] for one in (pending.content, content))
        if now != before:
            raise ModelError(
                "With aggregation.method = 'parameter_server_async' workers read the shards they compute themselves, "
                "so what the script changed in a batch before run.step would be lost; do it in the loss function."
            )

        def sizes(index: int) -> tuple[int, ...]:
            return shard_sizes(len(progress.samples(index)), job.virtual_shards)

        def read(index: int, shard: int) -> StepInput:
            assignment = Assignment(sizes(index), ((shard, shard + 1),), rank=0)
            samples = progress.samples(index)[slice(*assignment.span)]
            epoch, number = progress.place(index)
            (shard_content,) = self._reader.read_shards(
                pending.loading, epoch, [SampleRequest((samples,), number, shard)]
            )
            # Servers know of no loss scale.
            step_input = self._input(pending, index, assignment, shard_content, loss_fn)
            return replace(step_input, scale=lambda loss: loss)

        def factor(index: int) -> float:
            epoch, number = progress.place(index)
            seen = epoch * batch.samples_per_epoch + min(number * job.global_batch_size, batch.samples_per_epoch)
            return lr_factor(job, seen, batch.samples_per_epoch)

        def updated(loss: Tensor, is_made: bool) -> None:
            if is_made:
                self.trained.nonfinite.num_in_a_row = 0
            else:
                self.guard.leave_out(batch.index, loss, (), batch.samples)

        return AnyShard(
            batch=batch.index,
            num_shards=lambda index: len(sizes(index)),
            lr_factor=factor,
            read=read,
            at_base_rates=self._rates.at_base,
            stop=int(min(progress.steps + batch.num_left, self.session.next_save())),
            wants_pause=self.session.wants_pause,
            on_pause=self.session.on_pause,
            updated=updated,
        )
