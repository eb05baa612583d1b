"""Updates that the device leaves out by itself: torch's fused kernels do where `found_inf` is 1, for a GradScaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.dtensor_type import is_dtensor
from paceline.train.optimizers.joint_optimizer import parts_of
from paceline.train.optimizers.optim import FUSED


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the next update can be left out without the host, so that nothing of the optimizer changes.

    Not the first update of a parameter: its state would then be there, and torch's SGD takes what lies in memory for
    the momentum of the second one.
    """
    return all(
        type(one) in FUSED
        and all(group.get("fused") and not _is_new(one, group["params"]) for group in one.param_groups)
        for one in parts_of(optimizer)
    )


def _is_new(optimizer: Optimizer, parameters: list[Tensor]) -> bool:
    """Whether the optimizer has yet to make the state of some parameter, or torch's kernels take no shards of it."""
    if isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        return any(is_dtensor(one) for one in parameters)
    return any(is_dtensor(one) or (one.grad is not None and not optimizer.state.get(one)) for one in parameters)


@contextmanager
def left_out_where(optimizer: Optimizer, is_bad: Tensor) -> Iterator[None]:
    """A context in which an optimizer that `skips_on_device` updates where `is_bad`, a float32 scalar, is 0, not 1."""
    for one in parts_of(optimizer):
        one.found_inf = is_bad  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for one in parts_of(optimizer):
            del one.found_inf  # type: ignore[attr-defined]


def spoil_gradients_where(optimizer: Optimizer, is_bad: Tensor) -> None:
    """Make a gradient NaN where `is_bad`, a scalar, is not 0: a GradScaler, which looks at gradients alone, then leaves
    the update out."""
    first = next(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    first.masked_fill_(is_bad != 0, torch.nan)
