"""Weights alone as one safetensors file with plain state_dict names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save, save_model
from torch import Tensor, nn

from paceline.checkpoint.storage import Storage


def save_weights(model: nn.Module, path: Path) -> None:
    """Write all parameters and buffers; the file is complete or absent. Tied tensors are stored once."""
    unfinished = path.with_name(path.name + ".part")
    save_model(model, str(unfinished))
    unfinished.rename(path)


def export_weights(weights: Mapping[str, Tensor], storage: Storage, name: str) -> None:
    """Write weights that were read from a checkpoint; the file is complete or absent.

    Tied ones, the same object under several names, are stored once, as the first of these in alphabetical order. The
    file's metadata has the other names, as `safetensors.torch.load_model` expects.
    """
    kept: dict[int, str] = {}
    tied: dict[str, str] = {}
    for alias in sorted(weights):
        first = kept.setdefault(id(weights[alias]), alias)
        if first != alias:
            tied[alias] = first
    storage.write(name, [save({one: weights[one] for one in kept.values()}, metadata={"format": "pt", **tied})])
