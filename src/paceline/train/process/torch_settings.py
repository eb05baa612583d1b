"""Torch's settings for the whole process, which a run needs in one way or another: decided, said and restored here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from paceline import env
from paceline.object_collectives import all_gather_objects
from paceline.spec import Job, Plan
from paceline.train.process.process_group import World

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
    """The job with the precision that "auto" means on these workers, the same for all; and what the log says of it.

    A collective where it is "auto".
    """
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
