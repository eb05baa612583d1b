"""Optimizers that compute the gradient several times in a step, by a closure: LBFGS, SAM and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import JobError
from paceline.parallel import Engine
from paceline.spec import Job


def needs_closure(optimizer: Optimizer, engine: Engine, job: Job) -> bool:
    """Whether `optimizer.step` must be given a closure: it has such a parameter without a default.

    Raises:
        JobError: it must, and this run cannot compute a step's gradient again.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return False
    if not engine.holds_all or job.aggregation.method != "every_step" or job.precision == "float16":
        raise JobError(
            f"{type(optimizer).__name__} computes the gradient several times in a step, which needs the strategy dp, "
            "aggregation.method = 'every_step' and a precision other than 'float16'; choose these or another optimizer."
        )
    return True


def closure_after(loss: Tensor, again: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A closure whose first call returns `loss`, whose gradient is there already, and each later one `again()`."""
    known = [loss]
    return lambda: known.pop() if known else again()
