"""The states of the random number generators: a comparison shows whether some work drew random numbers."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import torch
from torch import Tensor

_MT19937_BYTES = 624 * 4 + 4
"""The size of NumPy's state: 624 words and a position."""

GeneratorStates = tuple[bytes, Tensor, Tensor | None, object]


def generator_states(device: torch.device) -> GeneratorStates:
    """The states of all generators that `StepInput.seed_shard` seeds; compare them by `equal_states`."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return _numpy_state(), torch.get_rng_state(), on_device, random.getstate()


def equal_states(before: GeneratorStates, after: GeneratorStates) -> bool:
    """Whether no random numbers were drawn between two states."""
    return (
        before[0] == after[0]
        and torch.equal(before[1], after[1])
        and (before[2] is None or after[2] is None or torch.equal(before[2], after[2]))
        and before[3] == after[3]
    )


def _numpy_state() -> bytes:
    # np.random.get_state() takes 100 us for a list of 624 numbers, which would show in the steps of small models.
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state).encode()  # the user has installed another bit generator
