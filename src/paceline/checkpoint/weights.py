"""The final weights as one safetensors file with plain state_dict names."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_model
from torch import nn


def save_weights(model: nn.Module, path: Path) -> None:
    """Write all parameters and buffers; the file is complete or absent. Tied tensors are stored once."""
    unfinished = path.with_suffix(".part")
    save_model(model, str(unfinished))
    unfinished.rename(path)
