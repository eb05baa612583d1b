"""Whether memory that a step frees is kept for the next step or given back at once."""

from __future__ import annotations

import ctypes

# mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest size glibc serves from its heap; activations of a CPU worker are mostly smaller.
_LARGEST_FROM_HEAP = 32 * 2**20
_NEVER = 2**31 - 1
# Blocks larger than this are returned to the kernel as soon as they are freed.
_LARGE = 2**20


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the kernel; other C libraries go on as they do.

    A training step frees megabytes of activations that the next one asks for again. By default they go back and
    come again page by page, each page zeroed by the kernel: a quarter of a small model's step on CPU.
    """
    _set(_LARGEST_FROM_HEAP, _NEVER)


def give_back_freed_memory() -> None:
    """Make glibc's malloc return large blocks to the kernel as soon as they are freed, and what was kept so far.

    Sharded parameters are gathered and freed block by block. Served from the heap, what is allocated in between keeps
    it from shrinking and from being used again: a worker that should hold a quarter of a model was seen to hold all.
    """
    if _set(_LARGE, _LARGE):
        ctypes.CDLL(None).malloc_trim(0)


def _set(mmap_threshold: int, trim_threshold: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_threshold)) and bool(mallopt(_M_TRIM_THRESHOLD, trim_threshold))
