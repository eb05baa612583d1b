"""How a worker's memory is handled: what malloc does with freed blocks, and a stated limit."""

from __future__ import annotations

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from paceline.errors import LaunchError

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
    holds does not count.

    Raises:
        LaunchError: this system cannot hold a process to a limit.
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
