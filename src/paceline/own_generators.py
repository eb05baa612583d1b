"""A generator of random numbers that a script has of its own, of torch, NumPy or Python, and its state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

RandomGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def full_state(generator: RandomGenerator) -> Any:
    """What `set_state` goes back to."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: RandomGenerator, state: Any) -> None:
    """Have a generator go on from where `full_state` found it."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
