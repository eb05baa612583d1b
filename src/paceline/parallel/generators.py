"""Whether something drew random numbers: told by the states of the generators before and after it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Everything that `StepInput.seed_shard` sets, fit to be compared."""
    cuda = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    _, state, position, *_ = np.random.get_state()
    return torch.get_rng_state().tolist(), cuda, random.getstate(), np.asarray(state).tolist(), position
