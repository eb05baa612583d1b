"""How a run computes: the precision of its forward passes, torch's settings for the whole process, `torch.compile`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.deterministic
from torch import nn

from paceline import env
from paceline.errors import JobError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.losses import Loss
from paceline.spec import Job, Mesh, Plan
from paceline.train.process_group import World

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


# --- torch's settings: decided, said and restored here ---

TF32_CAPABILITY = (8, 0)
"""The first compute capability of NVIDIA's with TF32, and with bfloat16: Ampere."""


@contextmanager
def torch_settings(job: Job, plan: Plan, device: torch.device) -> Iterator[list[str]]:
    """A context in which torch is set as a job needs it, and what was set before is restored after it; gives what the
    run's log and report say of that.

    Numeric parity: cuDNN tries which of its kernels is fastest, products of float32 matrices may round their factors
    to TF32 (10 bits of mantissa, not 23), and products in 16 bits may add up in these. Bitwise parity: none of that,
    and operations without a deterministic kernel are errors.
    """
    is_numeric = job.parity == "numeric"
    uses_tf32 = (is_numeric if job.tf32 is None else job.tf32) and has_tf32(device)
    cudnn: Any = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    wanted: list[tuple[Any, str, bool]] = [
        (cudnn, "benchmark", is_numeric and device.type == "cuda"),
        (cudnn, "deterministic", not is_numeric or cudnn.deterministic),
        (matmul, "allow_fp16_reduced_precision_reduction", is_numeric),
        (matmul, "allow_bf16_reduced_precision_reduction", is_numeric),
    ]
    if not is_numeric:
        # Memory that nobody has written is read by nobody: filling it only takes time.
        wanted.append((torch.utils.deterministic, "fill_uninitialized_memory", False))
    with ExitStack() as before:
        before.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(plan.threads_per_worker)
        if not is_numeric or uses_tf32:
            # Their former values are read by the newer name, which never refuses to answer.
            before.callback(setattr, matmul, "allow_tf32", matmul.fp32_precision == "tf32")
            before.callback(setattr, cudnn, "allow_tf32", cudnn.conv.fp32_precision == "tf32")
            matmul.allow_tf32 = cudnn.allow_tf32 = uses_tf32
        for holder, name, value in wanted:
            before.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        if not is_numeric:
            before.enter_context(env.deterministic_cuda())
            # Not use_deterministic_algorithms, which loads torch's whole compiler: seconds at the end of every run.
            before.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            torch.set_deterministic_debug_mode("error")
        note = "float32 products are computed in TF32, to 10 bits of mantissa; tf32 = false computes them in float32"
        yield [note] if uses_tf32 and job.precision != "float64" else []


def decide_precision(job: Job, world: World) -> tuple[Job, list[str]]:
    """The job with the precision that "auto" means on these workers, the same for all; and what the log says of it. A
    collective where it is "auto"."""
    if job.precision != "auto":
        return job, []
    if all(all_gather_objects(has_tf32(world.device), world.group)):
        note = "forward passes compute in bfloat16, as all GPUs have it; precision = 'float32' computes in float32"
        return dataclasses.replace(job, precision="bfloat16"), [note]
    note = "forward passes compute in float32, as not every worker has a GPU that is fast in bfloat16"
    return dataclasses.replace(job, precision="float32"), [note]


def has_tf32(device: torch.device) -> bool:
    """Whether a device computes in TF32, and fast in bfloat16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY


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


def compile_options(job: Job) -> dict[str, bool]:
    """The options of torch.compile for a job's mode.

    Compiled kernels draw the random numbers of eager ones: a worker that meets too many shapes computes without
    kernels of its own, at a moment that depends on the number of workers, and dropout masks must not change with it.
    """
    return {"fallback_random": True, **_OPTIONS.get(str(job.compile), {})}


def check_can_be_compiled(job: Job, plan: Plan) -> None:
    """Raises `JobError` where a compiled model would not be used, as torch.compile sees no copies and stages of it, or
    would train otherwise, as compiled kernels may differ between shapes."""
    if job.parity == "bitwise" or (plan.mesh or Mesh()).pp > 1 or plan.devices_in_process > 1:
        raise JobError(
            "A model from torch.compile needs parity = 'numeric' and the strategy dp, fsdp or tp; choose these, or "
            "leave compile out."
        )
