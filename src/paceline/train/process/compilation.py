"""`torch.compile` in a run: the model itself is trained, compiled once its layers are what a strategy made of them."""

from __future__ import annotations

from torch import nn

from paceline.errors import JobError
from paceline.spec import Job, Mesh, Plan

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
