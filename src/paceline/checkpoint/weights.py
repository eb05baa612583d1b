"""Weights alone as one safetensors file with plain state_dict names."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor

from paceline.checkpoint.storage import Storage


def save_weights(weights: Mapping[str, Tensor], storage: Storage, name: str) -> None:
    """Write a model's state_dict, of any shapes; the file is complete or absent.

    Tied tensors, the same memory under several names, are stored as the first of these in alphabetical order. The
    file's metadata has the other names, as `safetensors.torch.load_model` expects.

    Raises:
        OSError: it cannot be written.
    """
    kept: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for alias in sorted(weights):
        tensor = weights[alias]
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (alias,)
        first = kept.setdefault(memory, alias)
        if first != alias:
            tied[alias] = first
    tensors = {one: weights[one].detach().contiguous() for one in kept.values()}
    storage.write(name, [save(tensors, {"format": "pt", **tied})])
