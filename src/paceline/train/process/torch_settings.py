"""Torch's settings for the whole process, which a run needs in one way or another: decided, said and restored here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic

from paceline import env
from paceline.object_collectives import all_gather_objects
from paceline.spec import Job, Plan
from paceline.train.process.process_group import World

TF32_CAPABILITY = (8, 0)
"""The first compute capability of NVIDIA's with TF32, and with bfloat16: Ampere."""


@dataclass(frozen=True)
class TorchSettings:
    """Global settings of torch that a run makes while it lasts."""

    num_threads: int
    deterministic: bool
    """Operations without a deterministic kernel are errors, and cuDNN and cuBLAS take deterministic ones."""
    benchmark: bool
    """cuDNN tries which of its kernels is fastest."""
    tf32: bool
    """Products of float32 matrices, and convolutions, round their factors to TF32: 10 bits of mantissa, not 23."""
    reduced_sums: bool
    """Products in float16 and bfloat16 may add up in these as well."""

    @classmethod
    def of(cls, job: Job, plan: Plan, *, has_tf32: bool) -> TorchSettings:
        """What this job needs on a worker's device.

        Args:
            has_tf32: whether the device can compute in TF32.
        """
        is_numeric = job.parity == "numeric"
        wants_tf32 = is_numeric if job.tf32 is None else job.tf32
        return cls(
            num_threads=plan.threads_per_worker,
            deterministic=not is_numeric,
            benchmark=is_numeric and plan.device_kind == "cuda",
            tf32=wants_tf32 and has_tf32 and plan.device_kind == "cuda",
            reduced_sums=is_numeric,
        )

    def notes(self, job: Job) -> list[str]:
        """The settings that the user should know of, in sentences for the run's log and report."""
        if not self.tf32 or job.precision == "float64":
            return []
        return ["float32 products are computed in TF32, to 10 bits of mantissa; tf32 = false computes them in float32"]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which torch is set so; restores what was set before."""
        with ExitStack() as before:
            before.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self.num_threads)
            cudnn: Any = torch.backends.cudnn
            matmul = torch.backends.cuda.matmul
            wanted = [
                (cudnn, "benchmark", self.benchmark),
                (cudnn, "deterministic", self.deterministic or cudnn.deterministic),
                (matmul, "allow_fp16_reduced_precision_reduction", self.reduced_sums),
                (matmul, "allow_bf16_reduced_precision_reduction", self.reduced_sums),
            ]
            if self.deterministic:
                # Memory that nobody has written is read by nobody: filling it only takes time.
                wanted.append((torch.utils.deterministic, "fill_uninitialized_memory", False))
            if self.deterministic or self.tf32:
                # Their former values are read by the newer name, which never refuses to answer.
                before.callback(setattr, matmul, "allow_tf32", matmul.fp32_precision == "tf32")
                before.callback(setattr, cudnn, "allow_tf32", cudnn.conv.fp32_precision == "tf32")
                matmul.allow_tf32 = cudnn.allow_tf32 = self.tf32
            for holder, name, value in wanted:
                before.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, value)
            if self.deterministic:
                before.enter_context(env.deterministic_cuda())
                # Not use_deterministic_algorithms, which loads torch's whole compiler: seconds at the end of every run.
                before.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
                torch.set_deterministic_debug_mode("error")
            yield


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
