"""How a run computes: the precision of its forward passes, and `torch.compile`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.errors import JobError
from paceline.parallel.losses import Loss
from paceline.spec import Job, Mesh, Plan

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


# --- torch.compile: the model itself is trained, compiled once its layers are what a strategy made of them ---

_OPTIONS: dict[str, dict[str, bool]] = {
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True, "coordinate_descent_tuning": True},
}
"""torch.compile's modes as its options, which cannot be given beside a mode."""


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile(model)` wraps, or the model itself: strategies find its layers, and its weights
    have their own names."""
    return dict(model.named_children()).get("_orig_mod", model)


def compile_in_place(model: nn.Module, job: Job) -> None:
    """Compile a model as the job says.

    Compiled kernels draw the random numbers of eager ones: a worker that meets too many shapes computes without
    kernels of its own, at a moment that depends on the number of workers, and dropout masks must not change with it.
    """
    mode = job.compile if isinstance(job.compile, str) else ""
    model.compile(options={"fallback_random": True, **_OPTIONS.get(mode, {})})


def check_can_be_compiled(job: Job, plan: Plan) -> None:
    """Raises `JobError` for a strategy under which a compiled model would train otherwise or not be used."""
    if job.parity == "bitwise":
        raise JobError(
            "parity = 'bitwise' cannot train a model from torch.compile: compiled kernels may differ between shapes; "
            "give run.prepare the model itself, or use parity = 'numeric'."
        )
    if (plan.mesh or Mesh()).pp > 1 or plan.devices_in_process > 1:
        strategy = "dp_one_process" if plan.devices_in_process > 1 else "pp"
        raise JobError(
            f"The strategy {strategy} calls copies or stages of the model that torch.compile does not see; leave "
            "compile out, or use the strategies dp, fsdp or tp."
        )
