"""A worker's process: joining the other workers of a run, and leaving them; what malloc does with freed blocks, and a
stated limit of memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline import env
from paceline.errors import LaunchError
from paceline.heartbeat import RENDEZVOUS, Heartbeat
from paceline.spec import Plan
from paceline.train.watch import begin_watch, end_watch

GLOO_THREAD = "pt_gloo_runloop"
_REST_S = 2.0
"""The maximum wait for Gloo's threads at the end of a process."""


@dataclass(frozen=True)
class World:
    """This worker among the others: its facts, its device, and the group of all (None in a world of one)."""

    facts: env.WorkerFacts
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return self.facts.rank

    @property
    def world_size(self) -> int:
        return self.facts.world_size


def join(facts: env.WorkerFacts, plan: Plan) -> World:
    """Pick this worker's device and join the process group of all workers.

    The group lasts as long as the process: there is one rendezvous, the next run in the process uses the group again,
    and code of a script after its run works on many workers as on one. Raises `LaunchError` where more workers than
    GPUs on this node, or an existing process group that was set up differently.
    """
    device = _device(facts, plan)
    if device.type == "cpu":
        if plan.mesh is None or plan.mesh.is_plain:
            keep_freed_memory()
        else:
            give_back_freed_memory()
    if dist.is_initialized():  # a run before this one, or the user's script, was first
        if (dist.get_rank(), dist.get_world_size()) != (facts.rank, facts.world_size):
            raise LaunchError(
                f"A process group with this process as rank {dist.get_rank()} of {dist.get_world_size()} is already "
                f"there, but the environment says rank {facts.rank} of {facts.world_size}; call paceline.init before "
                "init_process_group, or start both alike."
            )
        return World(facts, device, dist.group.WORLD if facts.world_size > 1 else None)
    if facts.world_size == 1:
        return World(facts, device, None)
    timeout = timedelta(seconds=plan.timeout_s)
    with Heartbeat().inside(RENDEZVOUS):
        dist.init_process_group(
            plan.backend,
            init_method=facts.init_method,
            rank=facts.rank,
            world_size=facts.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    begin_watch(facts, plan.timeout_s)
    atexit.register(leave)
    return World(facts, device, dist.group.WORLD)


def leave() -> None:
    """Take the process group down, if it is still there; the end of the process does it too."""
    end_watch()
    if dist.is_initialized():
        dist.destroy_process_group()
        await_rest()


def await_rest() -> None:
    """Wait until no thread of Gloo has work left.

    When a collective is over for everybody else, such a thread still lets go of its tensors, for which it needs
    Python; if the interpreter is being taken down by then, the whole process aborts (pytorch/pytorch#190489). As long
    as a run's groups are held somewhere, destroying them ends no thread.
    """
    deadline = time.monotonic() + _REST_S
    num_looks = 0
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
    env.prepare_nccl()
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

# mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest size glibc serves from its heap; activations of a CPU worker are mostly smaller.
_LARGEST_FROM_HEAP = 32 * 2**20
_NEVER = 2**31 - 1
# Blocks larger than this are returned to the kernel as soon as they are freed.
_LARGE = 2**20
_STATUS = Path("/proc/self/status")


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the kernel; other C libraries go on as they do.

    A training step frees megabytes of activations that the next one asks for again. By default they go back and
    come again page by page, each page zeroed by the kernel: a quarter of a small model's step on CPU.
    """
    _set_thresholds(_LARGEST_FROM_HEAP, _NEVER)


def give_back_freed_memory() -> None:
    """Make glibc's malloc return large blocks to the kernel as soon as they are freed, and what was kept so far.

    Sharded parameters are gathered and freed block by block. Served from the heap, what is allocated in between keeps
    it from shrinking and from being used again: a worker that should hold a quarter of a model was seen to hold all.
    """
    if _set_thresholds(_LARGE, _LARGE):
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, trim_bytes))


@contextmanager
def memory_limit(limit_bytes: int | None, device: torch.device, model: nn.Module) -> Iterator[None]:
    """A context in which `model`, and all that training it needs, may use at most `limit_bytes`; None: any number.

    On a GPU torch's allocator keeps the limit; on a CPU the kernel does, counted from now on: what else the process
    holds does not count. Raises `LaunchError` where this system cannot hold a process to a limit.
    """
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        give_back_freed_memory()  # the kernel counts what the allocator keeps
        # What RLIMIT_DATA counts: the process's private writable memory, shared libraries left out.
        held_kb = re.search(r"^VmData:\s+(\d+) kB$", _STATUS.read_text() if _STATUS.exists() else "", re.MULTILINE)
        if held_kb is None:
            raise LaunchError("PACELINE_MEMORY_LIMIT needs Linux on a worker without a GPU; unset it.")
        before = resource.getrlimit(resource.RLIMIT_DATA)
        weights_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        limit = 1024 * int(held_kb[1]) - weights_bytes + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
