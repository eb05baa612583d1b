"""One training step, from a batch to an update."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.heartbeat import Heartbeat
from paceline.parallel import AnyShard, Assignment, StepInput, check_batch
from paceline.parallel.parts import clip
from paceline.spec import Mesh
from paceline.train.asynchronous import any_shard, check_unchanged
from paceline.train.data_progress import Batch
from paceline.train.nonfinite import NonFiniteGuard
from paceline.train.numerics import LossFn
from paceline.train.process_group import World
from paceline.train.reading import DatasetReader
from paceline.train.schedule import LearningRates
from paceline.train.seeding import seed_between_steps, seed_shard
from paceline.train.session import RunState, Session
from paceline.train.timing import StepTimer
from paceline.train.trace import ParityTracer


@dataclass(frozen=True)
class Pending:
    """A batch that was read and is to be trained on."""

    batch: Batch
    content: Any
    """This worker's samples of it."""
    dataset: Any


@dataclass
class Stepper:
    """Makes the steps of a run."""

    state: RunState
    session: Session
    rates: LearningRates
    guard: NonFiniteGuard
    world: World
    mesh: Mesh
    reader: DatasetReader
    timer: StepTimer
    heartbeat: Heartbeat
    tracer: ParityTracer
    is_whole: bool = True
    """Whether weights, optimizer, buffers and progress are those after one step, and none is in the middle of the
    next."""

    def step(self, pending: Pending, content: Any, loss_fn: LossFn) -> Tensor:
        """Train on a batch; returns its mean loss.

        Args:
            content: what the script made of `pending.content`.
        """
        job, progress, trained, batch = self.state.job, self.state.progress, self.state.trained, pending.batch
        engine = trained.engine
        self.is_whole = not engine.changes_buffers
        step_input = self._input(progress.steps, batch.assignment, content, loss_fn)
        if engine.reads_assignment:
            check_batch(content, sum(batch.assignment.sizes) or 1)
            step_input = replace(step_input, take_norms=self.state.noise.for_step(progress.steps, batch.assignment))
        else:
            check_unchanged(content, pending.content)
            step_input = replace(step_input, any_shard=self._any_shard(pending, loss_fn))
        self.rates.set(progress.samples_seen, batch.samples_per_epoch)
        trained.optimizer.zero_grad(set_to_none=True)

        loss = engine.step(step_input, functools.partial(self._update, batch, content))

        self.tracer.after_update(trained.model, engine.whole)
        progress.trained_on(batch)
        self.heartbeat.step(progress.steps)
        seed_between_steps(job.seed, progress.steps, self.world.device)
        self.timer.step_ended(engine.communication)
        self.is_whole = True
        if engine.is_synchronised:
            self.session.step_ended(self.timer.own_s)
        return loss

    def _input(self, index: int, assignment: Assignment, content: Any, loss_fn: LossFn) -> StepInput:
        """For this worker's assignment of the batch with this number, counted over the whole run."""
        precision = self.state.trained.precision
        return StepInput(
            assignment=assignment,
            batch=content,
            loss_of=precision.of(loss_fn),
            seed_shard=lambda shard: seed_shard(self.state.job.seed, index, shard, self.world.device),
            scale=precision.scaler.scale,
            within=precision.autocast,
        )

    def _any_shard(self, pending: Pending, loss_fn: LossFn) -> AnyShard:
        def read(index: int, assignment: Assignment) -> StepInput:
            epoch, _ = self.state.progress.place(index)
            samples = self.state.progress.samples(index)[slice(*assignment.span)]
            content = next(iter(self.reader.read(pending.dataset, epoch, [samples], train=True)))
            # Servers know of no loss scale.
            return replace(self._input(index, assignment, content, loss_fn), scale=lambda loss: loss)

        return any_shard(self.state.job, pending.batch, self.state.progress, self.rates, self.session, read)

    def _update(self, batch: Batch, content: Any, loss: Tensor) -> None:
        """Make an update by the gradients that are in `.grad`, unless they are not finite."""
        trained, step = self.state.trained, self.state.progress.steps
        engine, scaler, clip_norm = trained.engine, trained.precision.scaler, self.state.job.optim.clip_norm
        # A worker that is alone between two synchronisations may have no sample, hence no gradient and no update. One
        # that holds only a stage of the model may have no parameter, and goes on with those that have.
        has_gradient = not engine.holds_all or any(p.grad is not None for p in trained.model.parameters())
        norm = functools.cache(engine.gradient_norm)  # found once a step, where anybody asks for it
        is_made = has_gradient and self.guard.allows_update(step, loss, norm, batch.samples)
        self.is_whole = False
        if is_made and clip_norm is not None:
            scaler.unscale_(trained.optimizer)
            clip(trained.model.parameters(), clip_norm, norm())
        # Workers that compute other layers of a model have the same samples: they count once.
        idle = not batch.assignment.sizes or not self.mesh.leads_assignment(self.world.rank)
        self.tracer.before_update(step, trained.model, engine.whole, loss, content, idle=idle)
        if is_made:
            scaler.step(trained.optimizer)
            scaler.update()
