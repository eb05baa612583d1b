"""Hooks on the gradients of parameters (`parameter.register_hook`): which act alike on any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_linear(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> bool:
    """Whether a hook makes of a sum of gradients the sum of what it makes of them, as a mask or a factor does."""
    if parameter.is_meta:
        return True
    draws = torch.Generator().manual_seed(0)

    def made_of(gradient: Tensor) -> Tensor:
        given = gradient.to(parameter, copy=True)
        made = hook(given)
        return (given if made is None else made).to(gradient)

    for scale in (1e-4, 1.0, 1e4):
        one, other = (torch.randn(parameter.shape, generator=draws) * scale for _ in range(2))
        apart, together = made_of(one) + made_of(other), made_of(one + other)
        if float((apart - together).norm()) > 2e-2 * float(together.norm()):
            return False
    return True


def changes_parts(name: str) -> str:
    """What to tell about a hook on the parameter `name` that is not linear."""
    return (
        f"The parameter '{name}' has a hook that changes parts of its gradient, on each worker those of its own "
        "samples; change the whole gradient in a hook of the optimizer (register_step_pre_hook)."
    )
