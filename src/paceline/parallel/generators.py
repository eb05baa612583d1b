"""The random number generators of Python, NumPy and torch: their seeds, and their states, which show whether some work
drew random numbers."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MT19937_BYTES = 624 * 4 + 4
"""The size of NumPy's state: 624 words and a position."""

GeneratorStates = tuple[bytes, bytes, bytes, object]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all generators. Not by torch.manual_seed, which keeps a call and its stack trace for an unused CUDA."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator_states(device: torch.device) -> GeneratorStates:
    """The states of all generators that `seed_generators` seeds: equal where nothing was drawn in between."""
    return _numpy_state(), *torch_states(device), random.getstate()


def torch_states(device: torch.device) -> tuple[bytes, bytes]:
    """The states of torch's own generators, of the host and of a GPU."""
    on_device = _bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else b""
    return _bytes(torch.get_rng_state()), on_device


def host_states() -> tuple[bytes, tuple[Any, ...]]:
    """The states of NumPy's and Python's generators."""
    return _numpy_state(), random.getstate()


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _numpy_state() -> bytes:
    # np.random.get_state() takes 100 us for a list of 624 numbers, which would show in the steps of small models.
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state).encode()  # the user has installed another bit generator
