"""The global generators of Python, NumPy and torch, lent to code that draws from them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_global_generators(seed: int) -> None:
    """Seed all three by a 63-bit number; torch's for the CPU alone, since a forked process must not call CUDA."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """Afterwards the generators are in the states in which they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
