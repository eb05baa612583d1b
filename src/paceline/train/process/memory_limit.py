"""A stated limit on a worker's memory, held by the allocators themselves.

On a CPU it stands for a GPU's memory: the kernel refuses what is over it, and torch's allocator raises an error, as
a full GPU does. Also for workers that share a machine with others.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from paceline.errors import LaunchError
from paceline.train.process.allocator import give_back_freed_memory

_STATUS = Path("/proc/self/status")


@contextmanager
def memory_limit(limit_bytes: int | None, device: torch.device, model: nn.Module) -> Iterator[None]:
    """A context in which `model`, and all that training it needs, may use at most `limit_bytes`; None: any number.

    On a CPU they count from now on: what else the process holds does not count, as it would not on a GPU.

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
        if not _STATUS.exists():
            raise LaunchError("PACELINE_MEMORY_LIMIT needs Linux on a worker without a GPU; unset it.")
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        give_back_freed_memory()  # the kernel counts what the allocator keeps
        weights_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        resource.setrlimit(resource.RLIMIT_DATA, (_held_bytes() - weights_bytes + limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _held_bytes() -> int:
    """What the kernel counts for RLIMIT_DATA: the process's private writable memory, shared libraries left out."""
    found = re.search(r"^VmData:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None  # every Linux writes it
    return int(found.group(1)) * 1024
