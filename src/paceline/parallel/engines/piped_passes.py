"""Virtual shards as the micro-batches of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from paceline.parallel.buffers import standing_in
from paceline.parallel.engine import StepInput
from paceline.parallel.losses import ShardLoss
from paceline.parallel.passes import Passes
from paceline.parallel.pipeline import MicroBatch


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
        loss_of=loss_of, before_forward=lambda: passes.enter(step, shard), within=within, scale=step.scale
    )


def stand_in_batch(passes: Passes, step: StepInput, module: nn.Module) -> MicroBatch:
    """A micro-batch that counts for nothing, for a worker that has to go through collectives with others."""

    @contextmanager
    def within() -> Iterator[None]:
        with step.within(), standing_in(module):
            yield

    return MicroBatch(
        loss_of=lambda model: passes.loss_of_nothing(step, model).weighted,
        within=within,
        scale=step.scale,
    )
