"""How a run computes: the precision of its forward passes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.parallel.losses import Loss
from paceline.spec import Job

LossFn = Callable[[nn.Module, Any], Loss]
"""The loss of a batch, from the prepared model and the batch: the mean over its samples, or a `Mean`."""

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """A job's precision on this worker's device."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._kind = device.type
        self._dtype = _AUTOCAST.get(job.precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "float16")
        """Scales the loss, so that small gradients do not become zero in float16; does nothing in other precisions."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward passes (autocast)."""
        return nullcontext() if self._dtype is None else torch.autocast(self._kind, dtype=self._dtype)

    def of(self, loss_fn: LossFn) -> LossFn:
        """The same loss function, computing in this precision."""

        def loss_of(model: nn.Module, batch: Any) -> Loss:
            with self.autocast():
                return loss_fn(model, batch)

        return loss_of


def loss_name(loss_fn: LossFn) -> str:
    """Where a loss function is written: a name that is the same on all workers, in all steps and after a resume."""
    function: Any = inspect.unwrap(loss_fn)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
