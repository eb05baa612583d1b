"""`torch.compile` in a run: what is trained is the model itself, compiled once its layers are what a strategy made of
them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from paceline.errors import JobError
from paceline.spec import Job, Mesh, Plan

Compile = Callable[[nn.Module], None]
"""Compiles a model in place."""


def without_compiler(model: nn.Module, job: Job) -> tuple[nn.Module, Compile | None]:
    """A model that may come from `torch.compile`, as it was written; and how to compile it as the script or the job
    does, if one of them does.

    So the names of its weights are those of the model alone, and strategies find its layers.
    """
    wrapped = model._modules.get("_orig_mod")
    compiler: Any = getattr(model, "dynamo_ctx", None)
    if wrapped is not None and compiler is not None:

        def as_before(plain: nn.Module) -> None:
            plain._compiled_call_impl = compiler(plain._call_impl)

        return wrapped, as_before
    if job.compile:
        mode = job.compile if isinstance(job.compile, str) else None
        return model, lambda plain: plain.compile(mode=mode)
    is_compiled = any(_is_compiled(module) for module in model.modules())
    return model, (lambda _plain: None) if is_compiled else None  # in place, and stays so


def _is_compiled(module: nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules


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


def draws_as_uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled kernels draw the same random numbers as uncompiled ones.

    A worker that meets too many shapes computes without kernels of its own, at a moment that depends on the number of
    workers: dropout masks must not change with it.
    """
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return patched
