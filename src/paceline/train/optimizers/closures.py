"""Optimizers that compute the gradient several times in a step, by a closure: LBFGS, SAM and others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import JobError
from paceline.parallel import Engine
from paceline.spec import Job
from paceline.train.optimizers.joint_optimizer import JointOptimizer


def takes_closure(optimizer: Optimizer, engine: Engine, job: Job) -> bool:
    """Whether to pass a closure to `optimizer.step`: always if its parameter `closure` has no default; if it has one,
    only for optimizers outside of torch.optim, and if this run can compute a step's gradient again (those of
    torch.optim compute it once without a closure).

    Raises:
        JobError: the optimizer needs a closure, but this run cannot compute a step's gradient again.
    """
    if isinstance(optimizer, JointOptimizer):
        for one in optimizer.optimizers:
            if must_have_closure(one):
                raise JobError(
                    f"{type(one).__name__} computes the gradient several times in a step, so it has to be its model's "
                    "only optimizer."
                )
        return False
    is_possible = engine.holds_all and job.aggregation.method == "every_step" and job.precision != "float16"
    if must_have_closure(optimizer) and not is_possible:
        raise JobError(
            f"{type(optimizer).__name__} computes the gradient several times in a step, which needs the strategy dp, "
            "aggregation.method = 'every_step' and a precision other than 'float16'; choose these or another optimizer."
        )
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return must_have_closure(optimizer) or (is_possible and not is_torchs and _closure(optimizer) is not None)


def _closure(optimizer: Optimizer) -> inspect.Parameter | None:
    return inspect.signature(type(optimizer).step).parameters.get("closure")


def must_have_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` has a parameter for a closure, without a default."""
    closure = _closure(optimizer)
    return closure is not None and closure.default is inspect.Parameter.empty


def closure_after(
    loss: Tensor, parameters: Iterable[nn.Parameter], again: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """A closure that computes a step's gradient again and returns its loss; not at its first call where the one that is
    there already is still right: weights are those of `loss`, and gradients are, or what the optimizer has made of them
    before, as one that clips them."""
    held = list(parameters)
    weights, gradients = _marks(held), _marks([parameter.grad for parameter in held])
    is_first = True

    def closure() -> Tensor:
        nonlocal is_first
        is_known = is_first and _marks(held) == weights
        now = [parameter.grad for parameter in held]
        if is_known and _marks(now) != gradients:
            is_known = any(one is not None and bool(one.any()) for one in now)  # else they were set to zero
        is_first = False
        if is_known:
            return loss
        with torch.enable_grad():
            return again()

    return closure


def _marks(tensors: Iterable[Tensor | None]) -> list[tuple[int, int, int] | None]:
    """What changes when the values of any of them do."""
    return [None if one is None else (id(one), one.data_ptr(), one._version) for one in tensors]
