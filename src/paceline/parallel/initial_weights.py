"""The initial weights: rank 0's, or drawn layer by layer if no worker can hold them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.dtensor import shard_like
from paceline.tensors import local_shard

ALIGNMENT_BYTES = 64
"""The alignment of torch's host memory."""


def align(model: nn.Module) -> None:
    """Let all parameters begin where torch's own do, since the last bits of a product depend on where its factors
    begin: parameters that were read from a file may lie anywhere, and gathered ones do not."""
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.data_ptr() % ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone()


def draw(shapes: nn.Module, mine: nn.Module, device: torch.device) -> None:
    """Give the part of a model that a worker holds its weights, where the model was built on the meta device.

    Every worker makes one layer of the whole model at a time in CPU memory, lets its `reset_parameters` draw, and keeps
    its shard. So the weights do not depend on how the model is sharded, and no worker ever holds more than its shards
    and one layer. Raises `ModelError` where a layer cannot draw its own weights.

    Args:
        shapes: a copy of the whole model, before it was sharded.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for layer in mine.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((layer, name))
    mine.to_empty(device=device)
    for (first, first_name), *others in places.values():  # shared parameters stay shared
        for layer, name in others:
            setattr(layer, name, getattr(first, first_name))
    targets = dict(_tensors(mine, remove_duplicate=False))
    drawn: set[int] = set()
    for path, layer in shapes.named_modules():
        own = {name: value for name, value in _tensors(layer, recurse=False) if id(value) not in drawn}
        drawn |= {id(value) for value in own.values()}
        if not own:
            continue
        reset = getattr(type(layer), "reset_parameters", None)
        if reset is None:
            raise ModelError(
                f"The layer '{path or 'model'}' of type {type(layer).__name__} was built on the meta device and has no "
                "reset_parameters() to draw its weights with; give it one, or build the model on a real device."
            )
        layer.to_empty(device="cpu", recurse=False)
        reset(layer)
        for name in own:
            key = f"{path}.{name}" if path else name
            if key in targets:
                fresh = dict(_tensors(layer, recurse=False))[name].detach()
                local_shard(targets[key]).copy_(local_shard(shard_like(fresh, targets[key])))
        layer.to_empty(device="meta", recurse=False)


def _tensors(module: nn.Module, **which: Any) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(**which)
    yield from module.named_buffers(**which)
