"""Nested values (dictionaries, lists and tuples with tensors in them) as JSON and named tensors, and back.

Checkpoints and messages between workers consist of these. A tensor is named by the path to it
("optimizer/state/conv.weight/momentum_buffer"), and its name stands for it in the JSON. Nothing that could run code
when it is read is ever written: values of other types are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.dtensor_type import is_dtensor

_KINDS = ("tensor", "tuple", "pairs", "number", "object")
"""Keys of the one-entry objects that stand for values that JSON lacks."""

_TAKEN = "__metadata__"
"""A name with another meaning in the safetensors format."""


def flatten(value: Any, path: str = "", classes: Iterable[type] = ()) -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON, and its tensors by name.

    Tensors that share one memory, such as tied weights, have one name and are one tensor again after reading.

    Args:
        path: that of `value` itself, with which the names of tensors begin.
        classes: the dataclasses that may be in it.

    Raises:
        TypeError: a value of another type; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    known: dict[object, str] = {}
    kinds = set(classes)

    def name(path: str, tensor: Tensor) -> str:
        memory = memory_of(tensor)
        if memory in known:
            return known[memory]
        while path in tensors or path == _TAKEN:  # "a/b" is a key too, and b in a
            path += "'"
        tensors[path] = tensor.detach()
        if memory is not None:
            known[memory] = path
        return path

    def plain(value: Any, path: str) -> Any:
        def inside(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
            return [(key, plain(item, f"{path}/{key}" if path else str(key))) for key, item in items]

        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return value if math.isfinite(value) else {"number": repr(float(value))}
            case Tensor():
                return {"tensor": name(path, value)}
            case np.generic():
                return plain(value.item(), path)
            case list() | tuple():
                items = [item for _, item in inside(enumerate(value))]
                return items if isinstance(value, list) else {"tuple": items}
            case Mapping() if all(isinstance(key, str | int) for key in value):
                is_json = all(isinstance(key, str) for key in value) and not _is_kind(value)
                items = inside(value.items())
                return dict(items) if is_json else {"pairs": [list(item) for item in items]}
        if dataclasses.is_dataclass(value) and type(value) in kinds:
            fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
            return {"object": [type(value).__name__, dict(inside(fields))]}
        raise TypeError(
            f"the value at '{path}' is a {type(value).__name__}; it should consist of tensors, numbers, texts, and "
            "lists and dictionaries of these"
        )

    try:
        return plain(value, path), tensors
    except RecursionError:
        raise TypeError(f"the value at '{path}' is nested too deeply, or contains itself") from None


def unflatten(plain: Any, tensor_of: Callable[[str], Any], classes: Iterable[type] = ()) -> Any:
    """The value that `flatten` was given.

    Args:
        tensor_of: returns a tensor, or what stands for one, by its name; a KeyError if there is none.
        classes: the dataclasses that may be in it.

    Raises:
        ValueError: `plain` was not made by `flatten`, or is of another class.
    """
    kinds = {kind.__name__: kind for kind in classes}

    def whole(plain: Any) -> Any:
        if isinstance(plain, list):
            return [whole(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        if not _is_kind(plain):
            return {key: whole(item) for key, item in plain.items()}
        match plain:
            case {"tensor": str(name)}:
                return tensor_of(name)
            case {"number": "nan" | "inf" | "-inf" as number}:
                return float(number)
            case {"tuple": list(items)}:
                return tuple(whole(item) for item in items)
            case {"pairs": list(pairs)}:
                return {key: whole(item) for key, item in pairs}
            case {"object": [str(name), dict(fields)]}:
                return kinds[name](**{key: whole(item) for key, item in fields.items()})
        raise ValueError(f"there is a '{next(iter(plain))}' that is none")

    try:
        return whole(plain)
    except KeyError as problem:
        raise ValueError(f"{problem.args[0]!r} is missing") from None
    except (TypeError, RecursionError) as problem:
        raise ValueError(str(problem)) from None


def _is_kind(value: Mapping[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in _KINDS


def memory_of(tensor: Tensor) -> object:
    """Equal for tensors that share memory; None where workers could not agree on it (shards may be empty)."""
    if is_dtensor(tensor) or not tensor.numel() or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
