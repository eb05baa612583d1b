"""Nested state (dictionaries and lists with tensors in them) as JSON and named tensors, and back.

A tensor is named by the path to it ("optimizer/state/conv.weight/momentum_buffer") and goes into a data file; all else
becomes JSON, in which the tensor's name stands for it. Nothing that could run code when it is read is ever written:
values of other types are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.dtensor_type import is_dtensor
from paceline.errors import CheckpointError

_KINDS = ("tensor", "tuple", "pairs", "number")
"""Keys of the one-entry objects that stand for values that JSON lacks."""

_NOT_FINITE = ("nan", "inf", "-inf")

_TAKEN = "__metadata__"
"""A name with another meaning in the safetensors format."""

_TOO_DEEP = "The state is nested too deeply for a checkpoint, or contains itself."


def flatten_state(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON, and its tensors by name.

    Tensors that share one memory, such as tied weights, have one name and are one tensor again after reading.

    Raises:
        CheckpointError: a value is neither a tensor nor plain data; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    known: dict[object, str] = {}

    def name(path: str, tensor: Tensor) -> str:
        place = _memory(tensor)
        if place in known:
            return known[place]
        while path in tensors or path == _TAKEN:  # "a/b" is a key too, and b in a
            path += "'"
        tensors[path] = tensor.detach()
        if place is not None:
            known[place] = path
        return path

    try:
        return _plain(value, path, name), tensors
    except RecursionError:
        raise CheckpointError(_TOO_DEEP) from None


def _memory(tensor: Tensor) -> object:
    """Equal for tensors that share memory; None where workers could not agree on it (shards may be empty)."""
    if is_dtensor(tensor) or not tensor.numel() or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _plain(value: Any, path: str, name: Callable[[str, Tensor], str]) -> Any:
    def inside(item: Any, key: object) -> Any:
        return _plain(item, f"{path}/{key}" if path else str(key), name)

    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"number": repr(float(value))}
        case Tensor():
            return {"tensor": name(path, value)}
        case np.generic():
            return _plain(value.item(), path, name)
        case list():
            return [inside(item, number) for number, item in enumerate(value)]
        case tuple():
            return {"tuple": [inside(item, number) for number, item in enumerate(value)]}
        case Mapping():
            texts = all(isinstance(key, str) for key in value)
            if texts and not (len(value) == 1 and next(iter(value)) in _KINDS):
                return {key: inside(item, key) for key, item in value.items()}
            if all(isinstance(key, str | int) for key in value):
                return {"pairs": [[key, inside(item, key)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, path, name)
    raise CheckpointError(
        f"The state at '{path}' is a {type(value).__name__}, which a checkpoint cannot hold; give tensors, numbers, "
        "texts, and lists and dictionaries of these."
    )


def unflatten_state(plain: Any, tensor_of: Callable[[str], Any]) -> Any:
    """The value that `flatten_state` was given; `tensor_of` returns a tensor, or what stands for one, by its name.

    Raises:
        CheckpointError: `plain` was not made by `flatten_state`.
    """
    try:
        return _whole(plain, tensor_of)
    except RecursionError:
        raise CheckpointError(_TOO_DEEP) from None


def tensor_names(plain: Any) -> set[str]:
    """The names of the tensors that `unflatten_state` would ask for. Raises `CheckpointError` as it does."""
    names: list[str] = []
    unflatten_state(plain, names.append)
    return set(names)


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Dictionaries, lists and tuples of the same form, with what `function` returns for all that is in them."""
    match tree:
        case dict():
            return {key: map_leaves(item, function) for key, item in tree.items()}
        case list() | tuple():
            return type(tree)(map_leaves(item, function) for item in tree)
    return function(tree)


def _whole(plain: Any, tensor_of: Callable[[str], Any]) -> Any:
    match plain:
        case {"tensor": str(name)} if len(plain) == 1:
            return tensor_of(name)
        case {"number": str(text)} if len(plain) == 1 and text in _NOT_FINITE:
            return float(text)
        case {"tuple": list(items)} if len(plain) == 1:
            return tuple(_whole(item, tensor_of) for item in items)
        case {"pairs": list(pairs)} if len(plain) == 1 and all(map(_is_pair, pairs)):
            return {key: _whole(item, tensor_of) for key, item in pairs}
        case dict():
            if len(plain) == 1 and next(iter(plain)) in _KINDS:
                raise CheckpointError(f"its state holds a '{next(iter(plain))}' that is none")
            return {key: _whole(item, tensor_of) for key, item in plain.items()}
        case list():
            return [_whole(item, tensor_of) for item in plain]
    return plain


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int)
