"""Keeping memory that the next step will need again."""

from __future__ import annotations

import ctypes
import sys

# mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest size glibc serves from its heap; activations of a CPU worker are mostly smaller.
_LARGEST_FROM_HEAP = 32 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep what is freed instead of giving it back to the kernel. True if it listened.

    A training step frees megabytes of activations that the next one asks for again. By default they go back and
    come again page by page, each page zeroed by the kernel: a quarter of a small model's step on CPU.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
