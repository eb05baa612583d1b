"""Python values as JSON text and raw tensor memory.

What a stranger sends can at worst be a wrong value: unlike a pickle, decoding it runs no code. Values are None,
booleans, numbers, texts, bytes, lists, tuples, sets, dictionaries, tensors, torch dtypes, and the dataclasses that the
receiver names.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DivergenceError

MAX_TEXT_BYTES = 1 << 28
"""Longer messages are refused: nothing that workers tell each other as text comes near it."""


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """The text of `value`, and the tensors that it refers to by number, contiguous and in host memory.

    Tensors that share memory, such as tied weights, are sent once and are one tensor again when they arrive.

    Raises:
        TypeError: a value of a type that messages do not have.
    """
    found = _Tensors()
    plain = _plain(value, found)
    text = json.dumps({"value": plain, "tensors": [[str(t.dtype)[6:], [*t.shape]] for t in found.tensors]})
    return text.encode(), found.tensors


def empty_tensors(text: bytes) -> list[Tensor]:
    """Uninitialised tensors, of the shapes in a message's text, for the memory that follows it.

    Raises:
        DivergenceError: a text that `encode` did not make.
    """
    try:
        return [torch.empty(shape, dtype=_dtype(name)) for name, shape in json.loads(text)["tensors"]]
    except (ValueError, KeyError, TypeError, RecursionError, RuntimeError) as problem:
        raise _invalid(problem) from None


def decode(text: bytes, tensors: list[Tensor], classes: Iterable[type] = ()) -> Any:
    """The value that was encoded.

    Args:
        tensors: those of `empty_tensors`, filled.
        classes: the dataclasses that it may have in it.

    Raises:
        DivergenceError: a text that `encode` did not make, or another class.
    """
    try:
        return _value(json.loads(text)["value"], tensors, {kind.__name__: kind for kind in classes})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as problem:
        raise _invalid(problem) from None


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of any shape in host memory, to be sent from or received into."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _invalid(problem: Exception) -> DivergenceError:
    return DivergenceError(f"A message from another worker cannot be read ({type(problem).__name__}: {problem}).")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'{name}' is no dtype")
    return dtype


class _Tensors:
    """The tensors of a message."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, tensor: Tensor) -> int:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._numbers:
            return self._numbers[memory]
        self._numbers[memory] = len(self.tensors)
        self.tensors.append(tensor.cpu().contiguous())
        return self._numbers[memory]


# Every value but None, booleans, numbers, texts and lists is a list of a tag and its contents, inside an object.
def _plain(value: Any, tensors: _Tensors) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else {"float": repr(float(value))}
        case Tensor():
            return {"tensor": tensors.number(value.detach())}
        case bytes():
            flat = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0).byte()
            return {"bytes": tensors.number(flat)}
        case torch.dtype():
            return {"dtype": str(value)[6:]}
        case list():
            return [_plain(item, tensors) for item in value]
        case tuple():
            return {"tuple": [_plain(item, tensors) for item in value]}
        case set() | frozenset():
            return {"set": [_plain(item, tensors) for item in value]}
        case dict():
            return {"dict": [[_plain(key, tensors), _plain(item, tensors)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: [_plain(getattr(value, f.name), tensors) for f in dataclasses.fields(value)]}
    raise TypeError(f"A message cannot hold a {type(value).__name__}.")


def _value(plain: Any, tensors: list[Tensor], classes: dict[str, type]) -> Any:
    if isinstance(plain, list):
        return [_value(item, tensors, classes) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, content),) = plain.items()
    match tag:
        case "float":
            return float(content)
        case "tensor":
            return tensors[content]
        case "bytes":
            return memory(tensors[content]).tobytes()
        case "dtype":
            return _dtype(content)
        case "tuple":
            return tuple(_value(item, tensors, classes) for item in content)
        case "set":
            return frozenset(_value(item, tensors, classes) for item in content)
        case "dict":
            return {_value(key, tensors, classes): _value(item, tensors, classes) for key, item in content}
    return classes[tag](*(_value(item, tensors, classes) for item in content))
