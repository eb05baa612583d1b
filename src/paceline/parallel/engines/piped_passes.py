"""Virtual shards as the micro-batches of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.parallel.assignment import ShardRange
from paceline.parallel.batch_norm.norm import standing_in
from paceline.parallel.engine import StepInput
from paceline.parallel.losses import ShardLoss
from paceline.parallel.pipeline import MicroBatch
from paceline.parallel.shards.examination import check_repeatable_alone
from paceline.parallel.shards.passes import Passes


def check_repeatable_piped(passes: Passes, step: StepInput, module: nn.Module) -> None:
    """Check once for each loss function that the loss of a shard does not follow from earlier calls; a collective.

    Args:
        module: a worker's stages, which computes the whole model without gradients.

    Raises:
        ModelError: it does.
    """
    hook = module.register_forward_hook(_with_gradients)
    try:
        check_repeatable_alone(passes, step, module, is_collective=True)
    finally:
        hook.remove()


def _with_gradients(_module: nn.Module, _arguments: Any, output: Any) -> Any:
    """The output of a model as a loss function may differentiate by it, where it is called so that it can."""
    if not torch.is_grad_enabled():
        return output

    def differentiable(leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().requires_grad_().clone() if is_real else leaf  # a leaf could not be changed in place

    return pytree.tree_map(differentiable, output)


def micro_batch_of(
    passes: Passes,
    step: StepInput,
    shards: ShardRange,
    take_loss: Callable[[ShardLoss], None],
    *,
    copies: bool = False,
) -> MicroBatch:
    """Some virtual shards as one micro-batch.

    Args:
        take_loss: called where the last stage is.
        copies: whether samples have to be copies in any case.
    """

    @contextmanager
    def backward() -> Iterator[None]:
        # Layers may run again, and other shards were here meanwhile.
        passes.norm.current.shards = shards
        with passes.norm.backward():
            yield

    def loss_of(model: nn.Module) -> Tensor:
        loss = passes.read(step, model, shards, passes.samples(step, shards, copies=copies), are_copies=copies)
        take_loss(loss)
        return loss.weighted

    return MicroBatch(
        loss_of=loss_of,
        before_forward=lambda: passes.enter(step, shards),
        within=step.within,
        backward=backward,
        scale=step.scale,
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
        backward=passes.norm.backward,
        scale=step.scale,
    )
