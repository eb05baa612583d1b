"""Several optimizers over one model, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.errors import ModelError


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

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts as one optimizer's: parameters are numbered through all groups."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for one in self.optimizers:
            own = one.state_dict()
            state |= {first + number: values for number, values in own["state"].items()}
            for group in own["param_groups"]:
                groups.append(group | {"params": [first + number for number in group["params"]]})
            first = sum(len(group["params"]) for group in groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        first = 0
        for one in self.optimizers:
            mine, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
            stop = first + sum(len(group["params"]) for group in mine)
            one.load_state_dict(
                {
                    "state": {n - first: values for n, values in state_dict["state"].items() if first <= n < stop},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in mine],
                }
            )
            first = stop


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that a model's optimizer consists of: itself, unless it joins several."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)
