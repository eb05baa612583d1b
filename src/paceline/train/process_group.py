"""A worker's process: joining the other workers of a run, and leaving them; what malloc does with freed blocks, and
torch's settings for the whole process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic

from paceline import env
from paceline.errors import LaunchError
from paceline.heartbeat import inside
from paceline.object_collectives import all_gather_objects
from paceline.spec import Job, Plan
from paceline.train.peers import begin_watch, end_watch, store_address

GLOO_THREAD = "pt_gloo_runloop"


@dataclass(frozen=True, kw_only=True)
class World(env.WorkerFacts):
    """This worker among the others: its device, and the group of all workers (None in a world of one)."""

    device: torch.device
    group: dist.ProcessGroup | None


def join(facts: env.WorkerFacts, plan: Plan) -> World:
    """Pick this worker's device and join the process group of all workers.

    The group lasts as long as the process: there is one rendezvous, the next run in the process uses the group again,
    and code of a script after its run works on many workers as on one. Raises `LaunchError` where more workers than
    GPUs on this node, or an existing process group that was set up differently.
    """
    device = _device(facts, plan)
    if device.type == "cpu":
        set_malloc(keeps_freed=plan.mesh is None or plan.mesh.is_plain)
    if dist.is_initialized():  # a run before this one, or the user's script, was first
        if (dist.get_rank(), dist.get_world_size()) != (facts.rank, facts.world_size):
            raise LaunchError(
                f"A process group with this process as rank {dist.get_rank()} of {dist.get_world_size()} is already "
                f"there, but the environment says rank {facts.rank} of {facts.world_size}; call paceline.init before "
                "init_process_group, or start both alike."
            )
    elif facts.world_size > 1:
        gc.freeze()  # what is loaded stays; else Python looks through all of it while more of torch is, and in steps
        with inside("the rendezvous of all workers"):
            _await_store(facts, plan.timeout_s)
            dist.init_process_group(
                plan.backend,
                init_method=facts.init_method,
                rank=facts.rank,
                world_size=facts.world_size,
                timeout=timedelta(seconds=plan.timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        begin_watch(facts, plan.timeout_s)
        atexit.register(leave)
    return World(**vars(facts), device=device, group=dist.group.WORLD if facts.world_size > 1 else None)


def _await_store(facts: env.WorkerFacts, timeout_s: float) -> None:
    """Wait until the store is served: torch's client rests for half a second after an attempt that came too early."""
    deadline = time.monotonic() + timeout_s
    while facts.rank > 0 and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(store_address(facts), timeout=1.0):
            return
        time.sleep(0.02)


def leave() -> None:
    """Take the process group down, if it is still there; the end of the process does it too."""
    end_watch()
    if dist.is_initialized():
        dist.destroy_process_group()
        await_gloo_threads()


def await_gloo_threads() -> None:
    """Wait until no thread of Gloo has work left.

    When a collective is over for everybody else, such a thread still lets go of its tensors, for which it needs
    Python; if the interpreter is being taken down by then, the whole process aborts (pytorch/pytorch#190489). As long
    as a run's groups are held somewhere, destroying them ends no thread.
    """
    deadline, num_looks = time.monotonic() + 2.0, 0
    while num_looks < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # meanwhile one that waits for Python gets it
        num_looks += 1
        for thread in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(OSError):  # it has ended
                name, _, figures = (thread / "stat").read_text().partition("(")[2].rpartition(")")
                if name == GLOO_THREAD and figures.split()[0] == "R":  # it computes, or would if it had a core
                    num_looks = 0


def _device(facts: env.WorkerFacts, plan: Plan) -> torch.device:
    if plan.device_kind == "cpu":
        return torch.device("cpu")
    # What torch and CUDA read when they are first used, unless the user has set it.
    if env.text(env.AGENT):  # torch's watchdog would end workers that have lost another one before they can save
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # As many queues as the hardware has. A run has more streams than the eight by default, and where two streams share
    # a queue, work that waits for another worker holds up the work behind it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if facts.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"Worker {facts.rank} wants GPU {facts.local_rank} of this node, on which torch finds "
            f"{torch.cuda.device_count()} that it can use; start as many workers as there are GPUs, install a torch "
            "built for CUDA, or set PACELINE_DEVICE=cpu."
        )
    device = torch.device("cuda", facts.local_rank)
    torch.cuda.set_device(device)
    return device


# --- memory ---

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""mallopt's parameters in glibc's malloc.h."""


def set_malloc(*, keeps_freed: bool) -> None:
    """Have glibc's malloc keep freed memory, or return large blocks to the kernel at once; other C libraries go on as
    they do.

    A training step frees megabytes of activations that the next one asks for again. By default they go back and come
    again page by page, each page zeroed by the kernel: a quarter of a small model's step on CPU. But sharded parameters
    are gathered and freed block by block: served from the heap, what is allocated in between keeps it from shrinking
    and from being used again, and a worker that should hold a quarter of a model was seen to hold all.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # The largest size that glibc serves from its heap is 32 MiB; activations of a CPU worker are mostly smaller.
        mmap_bytes, trim_bytes = (32 * 2**20, 2**31 - 1) if keeps_freed else (2**20, 2**20)
        mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(_M_TRIM_THRESHOLD, trim_bytes)


# --- torch's settings: decided, said and restored here ---


TF32_CAPABILITY = (8, 0)
"""The first compute capability of NVIDIA's with TF32, and with bfloat16: Ampere."""


def torch_settings(job: Job, plan: Plan, device: torch.device, before: contextlib.ExitStack) -> list[str]:
    """Set torch as a job needs it, and have `before` restore what was set before; returns what the run's log and report
    say of that.

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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
        # Not use_deterministic_algorithms, which loads torch's whole compiler: seconds at the end of every run.
        before.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        torch.set_deterministic_debug_mode("error")
    note = "float32 products are computed in TF32, to 10 bits of mantissa; tf32 = false computes them in float32"
    return [note] if uses_tf32 and job.precision != "float64" else []


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
