"""Calls of a loss function to look at what it returns, which leave no trace in models, generators and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from paceline.parallel.batch_norm.norm import mixing_nothing, standing_in
from paceline.parallel.engine import StepInput
from paceline.parallel.loss.coupling import leaving_no_trace, needs_gradients
from paceline.parallel.losses import ShardLoss

if TYPE_CHECKING:
    from paceline.parallel.shards.passes import Passes

Result = TypeVar("Result")


def loss_of_stand_in(passes: Passes, step: StepInput, module: nn.Module) -> ShardLoss:
    """The loss of a sample that counts for nothing, by a pass without a trace."""

    def loss() -> ShardLoss:
        with without_trace(passes, step), standing_in(passes.model), step.companions.standing_in():
            return passes.loss_of_nothing(step, module).detached()

    return with_gradients_if_needed(passes, step, loss)


def with_gradients_if_needed(passes: Passes, step: StepInput, compute: Callable[[], Result]) -> Result:
    """What `compute` returns, which calls the loss function without a trace: again with gradients where it computes
    some itself. All workers find that in the first of their passes."""
    known = passes.functions.differentiates
    try:
        return compute()
    except RuntimeError as problem:
        if step.loss_name in known or not needs_gradients(problem):
            raise
    known.add(step.loss_name)
    return compute()


@contextmanager
def without_trace(passes: Passes, step: StepInput, *, with_gradients: bool = False) -> Iterator[None]:
    with_gradients |= step.loss_name in passes.functions.differentiates
    with (
        passes.buffers.untouched(),
        leaving_no_trace(passes.model, passes.device, with_gradients=with_gradients),
        mixing_nothing(passes.model),
        passes.norm.forgotten_after_error(),
        passes.norm.backward(),
        step.companions.backward(),
    ):
        yield
