"""Weights alone as one safetensors file with plain state_dict names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from paceline.checkpoint.load import Stored, read_state
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.storage import Storage
from paceline.errors import CheckpointError


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


def read_weights(storage: Storage, name: str) -> tuple[Manifest, dict[str, Tensor]]:
    """The weights of the model in a checkpoint, or of the first of several, by name, in whole shapes.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no model.
    """

    def first_model(shared: dict[str, Any], _workers: list[dict[str, Any]]) -> dict[str, Any]:
        models = shared.get("models")
        first = next(iter(models.values()), None) if isinstance(models, dict) else shared
        model = first.get("model") if isinstance(first, dict) else None
        weights = {k: v for k, v in model.items() if isinstance(v, Stored)} if isinstance(model, dict) else {}
        if not weights:
            raise CheckpointError("it holds no model")
        return weights

    return read_state(storage, name, None, first_model)
