"""Several optimizers over one model, as one; and what optimizers ask of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.errors import JobError, ModelError
from paceline.parallel import Engine
from paceline.spec import Job


class JointOptimizer(Optimizer):
    """Optimizers of distinct parameters that make their updates together; each keeps its own state and groups."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """
        Raises:
            ModelError: there is none, or two hold the same parameter.
        """
        self.optimizers = tuple(optimizers)
        held = [id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]]
        if not held:
            raise ModelError("run.prepare was given no optimizer; give one, a list of several, or None.")
        if len(set(held)) < len(held):
            raise ModelError("Two of the optimizers hold the same parameter; give every parameter to one of them.")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """
        Raises:
            ModelError: a closure, which would be called by several.
        """
        if closure is not None:
            raise ModelError("A model with several optimizers cannot be trained with a closure; give it one optimizer.")
        for one in self.optimizers:
            one.step()


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that a model's optimizer consists of: itself, unless it joins several."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def needs_closure(optimizer: Optimizer, engine: Engine, job: Job) -> bool:
    """Whether `optimizer.step` has a parameter `closure` without a default, as that of LBFGS: it computes the gradient
    several times in a step.

    Raises:
        JobError: so it is, and this run cannot compute a step's gradient again.
    """
    closures = [inspect.signature(type(one).step).parameters.get("closure") for one in parts_of(optimizer)]
    if not any(closure is not None and closure.default is inspect.Parameter.empty for closure in closures):
        return False
    name = type(optimizer).__name__
    if isinstance(optimizer, JointOptimizer):
        raise JobError(
            "An optimizer that computes the gradient several times in a step has to be its model's only one."
        )
    if not engine.holds_all or job.aggregation.method != "every_step" or job.precision == "float16":
        raise JobError(
            f"{name} computes the gradient several times in a step, which needs the strategy dp, "
            "aggregation.method = 'every_step' and a precision other than 'float16'; choose these or another optimizer."
        )
    return True
