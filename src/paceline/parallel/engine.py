"""The engine: one global batch through a model that this worker trains together with others.

An engine is made of parts, each in a file of its own:

    runner     virtual shards through the model, one after the other, which is this file; as micro-batches of a pipeline
               (`stages.py`); or through copies on several devices (`copies.py`)
    layout     where parameters live: whole on every worker, or spread over a mesh
    reducer    how gradients become one: a running sum with buckets (`parity = "numeric"`), or a fixed tree ("bitwise")
    rhythm     when workers meet: in every step, which is this file; in outer steps; or at asynchronous servers

A step computes what one worker alone would: losses are weighted by samples, gradients are sums over virtual shards, and
no number of workers appears in any formula.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.parallel.audit import audit
from paceline.parallel.blocks import blocks_of
from paceline.parallel.fixed_order_sum import FixedOrderSum
from paceline.parallel.layout import Layout
from paceline.parallel.losses import LossLayouts, ShardLoss, StepLoss, block_gradients_unless, read_loss
from paceline.parallel.pass_state import BlockSeeds, Buffers, frozen_batch_norms, seed_generators
from paceline.parallel.running_sum import RunningSum
from paceline.parallel.step_input import GradientNorms, StepInput, TakeNorms
from paceline.spec import AlgorithmName
from paceline.tensors import map_tensors

Update = Callable[[Tensor], None]
"""Called with the loss when the gradient is in `.grad` of every parameter: makes the optimizer's step."""


Mark = float | torch.cuda.Event
"""A moment of a step, noted without synchronising the CPU with the device."""


Reducer = RunningSum | FixedOrderSum
"""Makes one gradient of those of all shards."""


class Passes:
    """Makes the forward and backward passes of one worker, or of one device of a worker."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        layouts: LossLayouts,
        like: Tensor,
        blocks: Mapping[str, nn.Module] | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """
        Args:
            like: a scalar of the dtype, and on the device, in which losses are added.
            blocks: those that draw by names of their own, by path in the whole model; None: all of `model`.
            buffers: what shards make of buffers is noted there; None: in those of `model`.
        """
        self.model = model
        self.device = device
        self.layouts = layouts
        self.like = like
        self.buffers = Buffers(model) if buffers is None else buffers
        self.first_loss = like
        """The loss of this worker's first shard in the last step whose samples are needed again, a scalar."""
        self.seeds = BlockSeeds(device, blocks_of(model) if blocks is None else blocks)
        self._outputs: list[Any] | None = None
        """What the model has returned in this pass; None between passes."""

        def keep_output(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if self._outputs is not None:
                self._outputs.append(output)

        # A function: `copy.deepcopy` of a model would copy the object of a bound method, with its process groups.
        model.register_forward_hook(keep_output)

    def enter(self, step: StepInput, shard: int) -> None:
        """Before a forward pass: the generators and buffers are those that the shard has on any worker."""
        seed = step.shard_seed(shard)
        seed_generators(seed, self.device)
        self.seeds.begin_shard(seed)
        for one in (self.buffers, *step.companions):
            one.begin_pass()

    def read(self, step: StepInput, shard: int) -> ShardLoss:
        """Call the loss function with a shard's samples, and see what it returned."""
        loss = self._read(step, step.content(shard), step.assignment.weight(shard), step.assignment.global_size)
        self.layouts.has_returned(step.loss_name, loss.layout)
        return loss

    def _read(self, step: StepInput, content: Any, fraction: float, size: int) -> ShardLoss:
        self._outputs = []
        try:
            loss = read_loss(step.loss_of(self.model, content), fraction, size, self.like)
            if not fraction:
                block_gradients_unless(False, self._outputs)
            elif isinstance(loss.weight, Tensor):
                block_gradients_unless(loss.weight != 0, self._outputs)
            return loss
        finally:
            self._outputs = None

    def statistics(self, step: StepInput, shard: int, loss: ShardLoss) -> Tensor:
        """After a forward pass, before its backward pass: what is added up over all shards besides gradients, the sums
        of the shard's loss and then the changes of buffers."""
        if step.reads_again and shard == step.assignment.own[0]:
            self.first_loss = loss.mean.detach()
        changes = self.buffers.changes(shard, step.assignment.weight(shard), loss.sums)
        return torch.cat([loss.sums, *changes]) if changes else loss.sums

    def backward(self, step: StepInput, loss: ShardLoss) -> None:
        """Add the gradient of a shard's loss, times its weight, to `.grad`."""
        step.scale(loss.weighted).backward()
        self.seeds.end()

    def zero_weight_loss(self, step: StepInput) -> ShardLoss:
        """The loss of the worker's first shard with the weight 0, through which nothing flows back; for contexts of
        `frozen_batch_norms`."""
        loss = self._read(step, map_tensors(step.batch.shards[0], torch.clone), 0.0, 1)
        return replace(loss, weight=0.0, weighted=loss.weighted * 0)


class Runner(Protocol):
    """Takes shards through a model otherwise than one after the other: a pipeline."""

    def run(self, step: StepInput, passes: Passes, reducer: Reducer, layout: Layout) -> None: ...


class Engine:
    """Trains a model together with the other workers, one global batch at a time."""

    reads_assignment = True
    """Whether a worker computes the samples assigned to it. If not, they need not be read: see `AnyShard`."""
    changes_state = False
    """Whether a step changes more than buffers before its update, so that one which fails half-way leaves a mixture."""
    weights_diverge = False
    """Whether workers' weights and optimizers differ between two synchronisations."""
    is_synchronised = True
    """Whether the last step synchronised all workers, so that they can exchange their status."""

    def __init__(
        self,
        layout: Layout,
        reducer: Reducer,
        runner: Runner | None = None,
        notes: Sequence[str] = (),
        algorithm: AlgorithmName | None = None,
    ) -> None:
        """
        Args:
            runner: of a pipeline; None: shards go through the model in turn.
            notes: notes for the run's log and report.
            algorithm: how gradients are summed, where that was chosen here; None: as the plan says.
        """
        self.algorithm = algorithm
        self.layout = layout
        self.module = layout.module
        self.holds_all = layout.holds_all
        self.notes = [*layout.notes, *notes]
        self.layouts = LossLayouts(layout.world)
        self.passes = Passes(layout.module, layout.device, self.layouts, layout.zero, layout.blocks)
        self.buffers = self.passes.buffers
        self._reducer = reducer
        self._runner = runner
        self._norm: Tensor | None = None
        self.whole = layout.whole
        now = time_mark(layout.device)
        self.communication: tuple[Mark, Mark] = now, now
        """The interval of the last step's exposed communication: last gradient computed to last gradient summed."""

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - whatever it is
        """End what runs in the background; `error` ends the run, if it is given."""
        self._reducer.close()

    # --- a step ---

    def step(self, step: StepInput, update: Update) -> StepLoss:
        """Train on one global batch; return its loss, the same on every worker."""
        result = self.gradients(step)
        update(result.loss)
        return result

    def gradients(self, step: StepInput) -> StepLoss:
        """Store the gradient of the global batch's loss in `.grad` of every parameter (None before); return that
        loss."""
        reducer, self._norm = self._reducer, None
        reducer.begin_step(step)
        if self._runner is None:
            # Autocast keeps casts of weights until its outermost context ends: one serves all shards. Not where layers
            # gather their weights for a pass: their casts would stay.
            is_cast_once = step.is_low_precision and self.holds_all
            with torch.autocast(self.layout.device.type, enabled=False) if is_cast_once else nullcontext():
                self._run_in_turn(step)
        else:
            self._runner.run(step, self.passes, reducer, self.layout)
        last_gradient = time_mark(self.layout.device)
        returned = self.layouts.of(step.loss_name)
        num_losses = returned.length if self.layout.knows_losses else 0
        sums = reducer.finish(num_losses + self.buffers.num_sums)
        losses, changes, *noise = sums.split([num_losses, self.buffers.num_sums, *[2] * (step.take_norms is not None)])
        losses = self.layout.complete(losses if num_losses else sums.new_zeros(returned.length))
        self.buffers.end_step(changes)
        result = StepLoss.of(losses, returned)
        reducer.leave_gradients(result.rescale)
        if step.take_norms is not None:
            self._tell_noise(step, step.take_norms, noise[0])
        self.communication = last_gradient, time_mark(self.layout.device)
        return result

    def _run_in_turn(self, step: StepInput) -> None:
        """This worker's shards forward and backward, one after the other, then stand-ins: samples that count for
        nothing, where others wait for this worker in the layers."""
        layout, passes, reducer = self.layout, self.passes, self._reducer
        first, stop = step.assignment.own
        num_passes = layout.num_passes(step.assignment)
        for number in range(num_passes):
            shard, is_last = first + number, number == num_passes - 1
            is_own = shard < stop
            layout.begin_pass(self.module, is_last=is_last, is_own=is_own)
            others = [] if is_own else [passes.model, *[one.model for one in step.companions]]
            with frozen_batch_norms(*others):  # the backward pass too, in which layers may be computed again
                if is_own:
                    passes.enter(step, shard)
                    loss = passes.read(step, shard)
                    if shard == stop - 1 and self.holds_all:  # else others wait in the layers of this pass
                        self.layouts.of(step.loss_name)  # agreed on before the first sum begins
                    reducer.forward_made(passes.statistics(step, shard, loss), is_last=shard == stop - 1)
                else:
                    for one in step.companions:
                        one.begin_pass()
                    loss = passes.zero_weight_loss(step)
                if is_last:
                    reducer.expect_last(self.module)
                passes.backward(step, loss)
            reducer.pass_made(number, loss if is_own else None)

    def _tell_noise(self, step: StepInput, take_norms: TakeNorms, noise: Tensor) -> None:
        num_parts, num_samples = self._reducer.measured(step.assignment)
        size = step.assignment.global_size
        if not self.layout.measures_first_pass or num_samples >= size * num_parts:
            return  # one part alone shows no noise
        small_sqr = noise[0] / noise[1]
        large_sqr = self.gradient_norm() ** 2
        take_norms(GradientNorms(small_sqr, num_samples / num_parts, large_sqr, size))

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient in `.grad`, a scalar, computed once a step; a collective if workers do
        not hold all of it."""
        if self._norm is None:
            self._norm = self._reducer.gradient_norm()
        return self._norm

    def keep_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Leave no gradient but those of these parameters."""
        kept = {id(parameter) for parameter in parameters}
        for parameter in self.module.parameters():
            parameter.grad = parameter.grad if id(parameter) in kept else None
        self._norm = None

    def audit(self, step: StepInput, *, has_gradients: bool) -> None:
        """Raise `ModelError` if the loss of the same samples, or with `has_gradients` its gradient, differs between
        workers or from call to call, between `gradients` and the update; a collective (`audit.py`)."""
        audit(self.passes, step, self.layout.world, has_gradients=has_gradients and self.holds_all)

    # --- workers that differ ---

    def sync_buffers(self) -> bool:
        """Broadcast rank 0's buffers where they differ; returns whether all weights are equal now. A collective, after
        a step."""
        return True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """A context in which all workers hold the same model, to evaluate or save. A collective.

        Training continues from its previous state, except that buffers that differ become rank 0's.
        """
        self.sync_buffers()
        yield

    # --- checkpoints ---

    def shared_state(self) -> dict[str, Any]:
        """The engine's state besides model and optimizer that is the same on all workers."""
        hidden = self.buffers.hidden_state()
        return {"hidden_buffers": hidden} if hidden else {}

    def model_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the model: what all workers have, or agree on."""
        return self.module.state_dict()

    def own_state(self) -> dict[str, Any]:
        """The engine's state of this worker: "sums", tensors that count by their sum over workers, and "means"."""
        return {}

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:  # noqa: ARG002 - most have none
        """Restore saved states, empty if nothing was saved; the model has its weights already."""
        self.buffers.load_hidden_state(shared.get("hidden_buffers", {}))


def time_mark(device: torch.device) -> Mark:
    """Now, as a CUDA event on a GPU, else by the wall clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks; on CUDA waits until the device has passed `end`."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
