"""Whether an error says that memory ran out."""

from __future__ import annotations

import torch


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out: a GPU's, or what this process may allocate."""
    words = str(problem)
    return isinstance(problem, torch.OutOfMemoryError | MemoryError) or (
        isinstance(problem, RuntimeError) and ("can't allocate memory" in words or "bad_alloc" in words)
    )
