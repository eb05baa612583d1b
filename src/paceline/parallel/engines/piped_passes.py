"""Virtual shards as the micro-batches of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paceline.containers import tensors
from paceline.parallel.buffers import standing_in
from paceline.parallel.engine import StepInput
from paceline.parallel.losses import ShardLoss
from paceline.parallel.passes import Passes


@dataclass(frozen=True)
class MicroBatch:
    """A virtual shard on its way through the stages."""

    loss_of: Callable[[nn.Module], Tensor]
    """Calls the user's loss function with the model it is given, on these samples: their loss, weighted."""
    form: Hashable = None
    """The shapes and types of the samples."""
    before_forward: Callable[[], None] = lambda: None
    """Called before the forward pass of every stage: seeds generators."""
    before_backward: Callable[[], None] = lambda: None
    """Called before the backward pass of every stage, in which layers may be computed again."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around the forward pass of every stage: autocast."""
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    """Applies the loss scale just before backward."""
    after_backward: Callable[[nn.Module], object] = lambda _stage: None
    """Called with a stage when the gradients of all of its parameters are there."""


def micro_batch_of(passes: Passes, step: StepInput, shard: int, take_loss: Callable[[ShardLoss], None]) -> MicroBatch:
    """A virtual shard as a micro-batch.

    Args:
        take_loss: called where the last stage is.
    """

    @contextmanager
    def within() -> Iterator[None]:
        with step.within():
            yield
        passes.buffers.end_forward(shard, step.assignment.weight(shard))

    def loss_of(model: nn.Module) -> Tensor:
        loss = passes.read(step, model, shard)
        take_loss(loss)
        return loss.weighted

    return MicroBatch(
        loss_of=loss_of,
        form=_form(step, *step.assignment.span_of(shard)),
        before_forward=lambda: passes.enter(step, shard),
        before_backward=lambda: passes.seeds.begin_shard(step.shard_seed(shard)),
        within=within,
        scale=step.scale,
    )


def _form(step: StepInput, start: int, stop: int) -> Hashable:
    content = step.batch.cut(start, stop)
    return step.loss_name, *((one.shape, one.dtype) for one in tensors(content))


def stand_in_batch(passes: Passes, step: StepInput, module: nn.Module) -> MicroBatch:
    """A micro-batch that counts for nothing, for a worker that has to go through collectives with others."""

    @contextmanager
    def within() -> Iterator[None]:
        with step.within(), standing_in(module):
            yield

    return MicroBatch(
        loss_of=lambda model: passes.loss_of_nothing(step, model).weighted,
        form=("nothing", _form(step, 0, passes.num_stand_ins(step))),
        within=within,
        scale=step.scale,
    )
