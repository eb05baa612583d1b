"""Where a model is, and the state of torch's generators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.parallel.model_graph import ModelCall

__all__ = ["ModelCall", "generator_state", "place_of"]


def place_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; the meta device where they have no values yet."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def generator_state(device: torch.device) -> Tensor:
    """The state of torch's generators that `device` uses: [num_bytes] uint8 in host memory."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return state
