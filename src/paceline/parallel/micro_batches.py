"""Virtual shards as the micro-batches of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.containers import tensors
from paceline.parallel.buffers import standing_in
from paceline.parallel.engine import Reducer
from paceline.parallel.fixed_order_sum import FixedOrderSum
from paceline.parallel.layout import Whole
from paceline.parallel.losses import ShardLoss
from paceline.parallel.passes import Passes
from paceline.parallel.step_input import StepInput

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


@dataclass(frozen=True)
class MicroBatch:
    """A virtual shard on its way through the stages."""

    loss_of: Callable[[], Tensor]
    """Calls the user's loss function on these samples: their loss, weighted."""
    form: Hashable = None
    """The shapes and types of the samples."""
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around the forward pass of every stage: seeds generators, and notes what the pass made of buffers."""
    before_backward: Callable[[], None] = lambda: None
    """Called before the backward pass of every stage, in which layers may be computed again."""
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    """Applies the loss scale just before backward."""
    after_backward: Callable[[nn.Module], object] = lambda _stage: None
    """Called with a stage when the gradients of all of its parameters are there."""


class PipelineRunner:
    """Takes a worker's virtual shards through the stages of a pipeline."""

    def __init__(self, pipeline: Pipeline, layout: Whole) -> None:
        self._pipeline = pipeline
        self._layout = layout

    def run(self, step: StepInput, passes: Passes, reducer: Reducer) -> None:
        """The step's shards forward and backward, and stand-ins where others have more; a collective."""
        step = replace(step, reads_again=True)  # every stage calls the loss function
        self._pipeline.seed_block = passes.seeds.seed_block
        passes.first_loss = passes.like + math.nan  # unless the last stage is here
        if isinstance(reducer, FixedOrderSum):
            num_stages = len(self._pipeline.stages)
            shards = [_Shard(passes, step, one, num_stages, reducer) for one in range(*step.assignment.own)]
            micro_batches = [shard.micro_batch for shard in shards]
            nothing = replace(_nothing(passes, step), after_backward=lambda _stage: reducer.pass_made(0, None))
        else:
            losses: list[Tensor] = []
            own = range(*step.assignment.own)
            micro_batches = [_micro_batch(passes, step, one, lambda loss: losses.append(loss.sums)) for one in own]
            nothing = _nothing(passes, step)
        num_stand_ins = self._layout.num_passes(step.assignment) - len(micro_batches)

        def expect_last(stage: nn.Module) -> None:
            self._layout.begin_pass(stage, is_last=True)
            reducer.expect_last(stage)

        self._layout.begin_pass(passes.model, is_last=False)
        self._pipeline.train_step([*micro_batches, *[nothing] * num_stand_ins], nothing, expect_last)
        passes.seeds.end()
        if not isinstance(reducer, FixedOrderSum) and micro_batches:
            sums = [torch.stack(losses).sum(0)] if losses else [passes.like.new_zeros(0)]
            statistics = torch.cat([*sums, *passes.buffers.take_moves(passes.like)])
            reducer.forward_made(statistics, is_last=True)


def _micro_batch(passes: Passes, step: StepInput, shard: int, take_loss: Callable[[ShardLoss], object]) -> MicroBatch:
    """A virtual shard as a micro-batch.

    Args:
        take_loss: called where the last stage is.
    """

    @contextmanager
    def forward() -> Iterator[None]:
        passes.enter(step, shard)
        yield
        passes.leave(step, shard)

    def loss_of() -> Tensor:
        loss = passes.read(step, shard)
        take_loss(loss)
        if shard == step.assignment.own[0]:
            passes.first_loss = loss.mean.detach()
        return loss.weighted

    return MicroBatch(
        loss_of=loss_of,
        form=_form(step, step.content(shard)),
        forward=forward,
        before_backward=lambda: passes.seeds.begin_shard(step.shard_seed(shard)),
        scale=step.scale,
    )


def _form(step: StepInput, content: Any) -> Hashable:
    return step.loss_name, *((one.shape, one.dtype) for one in tensors(content))


def _nothing(passes: Passes, step: StepInput) -> MicroBatch:
    """A micro-batch that counts for nothing, for a worker that has to go through collectives with others."""
    return MicroBatch(
        loss_of=lambda: passes.loss_of_nothing(step).weighted,
        form=("nothing", _form(step, step.batch.shards[0])),
        forward=lambda: standing_in(passes.model),
        scale=step.scale,
    )


class _Shard:
    """A virtual shard on its way through this worker's stages, whose gradients enter a fixed tree."""

    def __init__(self, passes: Passes, step: StepInput, number: int, num_stages: int, reducer: FixedOrderSum) -> None:
        self._passes, self._num_left, self._reducer = passes, num_stages, reducer
        self._losses: list[Tensor] = []
        self._weight = step.assignment.weight(number)
        self._moves = passes.like.new_zeros(passes.buffers.num_sums)
        self._gradients: list[Tensor | None] = []
        self._inner = _micro_batch(passes, step, number, lambda loss: self._losses.append(loss.sums))
        self.micro_batch = replace(self._inner, forward=self._forward, after_backward=self._after_backward)

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with self._inner.forward():
            yield
        moves = self._passes.buffers.take_moves(self._moves)  # of other stages' layers nothing
        self._moves += torch.cat(moves) if moves else 0

    def _after_backward(self, _stage: nn.Module) -> None:
        found = self._reducer.take_gradients()
        before = self._gradients or [None] * len(found)
        self._gradients = [old if new is None else new for old, new in zip(before, found, strict=True)]
        self._num_left -= 1
        if self._num_left == 0:
            self._reducer.forward_made(torch.cat([*self._losses, self._moves]), is_last=False)
            self._reducer.push(self._gradients, self._weight)
            self._gradients = []
