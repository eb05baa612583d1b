"""State as users hold it, dictionaries in dictionaries with tensors somewhere in them, and as it is kept.

Tensors get a name, the way to them ("optimizer/state/conv.weight/momentum_buffer"), and go into files of numbers; all
else becomes JSON, in which a tensor's place holds its name. Nothing that could run code when it is read is ever
written: a value that is neither is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import CheckpointError

_KINDS = ("tensor", "tuple", "pairs", "number")
"""Keys of the one-entry objects that stand for what JSON lacks."""


def take_apart(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON, and its tensors by name.

    Raises:
        CheckpointError: something in it is neither a tensor nor plain data; names where.
    """
    tensors: dict[str, Tensor] = {}
    return _plain(value, path, tensors), tensors


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    def inside(item: Any, key: object) -> Any:
        return _plain(item, f"{path}/{key}" if path else str(key), tensors)

    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"number": repr(value)}
        case Tensor():
            tensors[path] = value.detach()
            return {"tensor": path}
        case np.generic():
            return _plain(value.item(), path, tensors)
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
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, path, tensors)
    raise CheckpointError(
        f"The state at '{path}' is a {type(value).__name__}, which a checkpoint cannot hold; give tensors, numbers, "
        "texts, and lists and dictionaries of these."
    )


def put_together(plain: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The value that `take_apart` was given; `tensor_of` knows the tensors by name."""
    match plain:
        case {"tensor": str(name)} if len(plain) == 1:
            return tensor_of(name)
        case {"number": str(text)} if len(plain) == 1:
            return float(text)
        case {"tuple": list(items)} if len(plain) == 1:
            return tuple(put_together(item, tensor_of) for item in items)
        case {"pairs": list(pairs)} if len(plain) == 1:
            return {key: put_together(item, tensor_of) for key, item in pairs}
        case dict():
            return {key: put_together(item, tensor_of) for key, item in plain.items()}
        case list():
            return [put_together(item, tensor_of) for item in plain]
    return plain
