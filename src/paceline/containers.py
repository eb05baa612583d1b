"""What a batch may be made of: containers of tensors, taken apart one level at a time and made again as the same type.

Mappings, dataclasses, attrs classes, NamedTuples, lists and tuples, and whatever is registered with torch's pytree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Container:
    """A container that was taken apart."""

    places: tuple[str, ...]
    """Where in the container each value is: "['x']", "[0]" or ".field"."""
    values: tuple[Any, ...]
    make: Callable[[Sequence[Any]], Any]
    """A container of the same type with other values."""
    is_named: bool
    """Whether the values have names: one of them is then a field, and not a sample."""


def open_container(value: Any) -> Container | None:
    """`value` taken apart by one level; None if it is not a container."""
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, PackedSequence | str | bytes | type):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make = getattr(value, "_make", type(value))
        return Container(tuple(f".{name}" for name in value._fields), tuple(value), make, True)
    if isinstance(value, list | tuple):
        return Container(_numbered(value), tuple(value), type(value), False)
    if dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__"):
        return _record(value)
    registered = pytree.SUPPORTED_NODES.get(type(value))
    if registered is None:
        return None
    values, context = registered.flatten_fn(value)
    return Container(_numbered(values), tuple(values), lambda made: registered.unflatten_fn(list(made), context), False)


def _numbered(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"[{number}]" for number in range(len(values)))


def _mapping(mapping: Mapping[Any, Any]) -> Container:
    """A mapping, with what an instance of a subclass holds besides its entries."""
    keys = tuple(mapping)
    values = tuple(mapping[key] for key in keys)
    places = tuple(f"[{key!r}]" for key in keys)
    if type(mapping) is dict:
        return Container(places, values, lambda made: dict(zip(keys, made, strict=True)), True)
    if not isinstance(mapping, dict | UserDict):
        # A copy could share what its entries are kept in.
        constructor: Any = type(mapping)
        return Container(places, values, lambda made: constructor(dict(zip(keys, made, strict=True))), True)
    own = {} if getattr(mapping, "__dict__", mapping) is mapping else vars(mapping)
    names = [name for name in own if name not in mapping and not (name == "data" and isinstance(mapping, UserDict))]

    def make(made: Sequence[Any]) -> Any:
        new: Any = copy.copy(mapping)
        for key, value in zip(keys, made, strict=False):
            new[key] = value
            if key in own:
                object.__setattr__(new, key, value)
        for name, value in zip(names, made[len(keys) :], strict=True):
            object.__setattr__(new, name, value)
        if getattr(mapping, "__dict__", None) is mapping:  # its entries are its attributes
            new.__dict__ = new
        return new

    extra = tuple(own[name] for name in names)
    return Container((*places, *(f".{name}" for name in names)), (*values, *extra), make, True)


def _record(record: Any) -> Container:
    """A dataclass, an attrs class or a plain object, with whatever its instance holds."""
    fields: Any = getattr(type(record), "__attrs_attrs__", ())
    if dataclasses.is_dataclass(record):
        fields = dataclasses.fields(record)
    declared = [field.name for field in fields]
    names = [name for name in dict.fromkeys([*declared, *getattr(record, "__dict__", {})]) if hasattr(record, name)]

    def make(values: Sequence[Any]) -> Any:
        # Not by the constructor, which may want other arguments, and would compute anew what is cut already.
        made = copy.copy(record)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return Container(tuple(f".{name}" for name in names), tuple(getattr(record, name) for name in names), make, True)


def open_object(value: Any) -> Container | None:
    """As `open_container`, and any other object that has attributes; for what a model returns."""
    container = open_container(value)
    if (
        container is None
        and hasattr(value, "__dict__")
        and not isinstance(value, type | nn.Module)
        and not callable(value)
    ):
        return _record(value)
    return container


Open = Callable[[Any], Container | None]


def map_tensors(value: Any, convert: Callable[[Tensor], Any], opened: Open = open_container) -> Any:
    """`value` with every tensor in it converted, however nested; what is in unknown objects stays as it is."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, PackedSequence):
        data = convert(value.data)
        if data is value.data:
            return value
        # Its batch sizes stay in host memory; the order of its sequences goes with the data, as integers.
        order, back = (
            one if one is None else one.to(data.device) for one in (value.sorted_indices, value.unsorted_indices)
        )
        return PackedSequence(data, value.batch_sizes, order, back)
    return _map(value, lambda one: map_tensors(one, convert, opened), opened)


def versions(some: Iterable[Tensor]) -> list[int]:
    """The `version` of each tensor, of any shape."""
    return [version(one) for one in some]


def version(tensor: Tensor) -> int:
    """How often a tensor has been changed in place, 0 where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def tensors(value: Any, opened: Open = open_container) -> Iterator[Tensor]:
    """Every tensor in `value`, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    else:
        container = opened(value)
        for one in () if container is None else container.values:
            yield from tensors(one, opened)


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """`value` with every tensor in it on `device`; floating ones in float64 if that is `dtype`."""

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype == torch.float64 and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, non_blocking=True)

    return map_tensors(value, move)


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers that the host knows (a list, a NumPy array, a tensor), in their shape, on a device.

    On a GPU they come in the order of its stream, by way of pinned memory, and the host does not wait.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copied(value: Any) -> Any:
    """`value` with a copy of every tensor and NumPy array in it."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Tensor | PackedSequence):
        return map_tensors(value, torch.clone)
    return _map(value, copied, open_container)


def _map(value: Any, convert: Callable[[Any], Any], opened: Open) -> Any:
    container = opened(value)
    converted = [] if container is None else [convert(one) for one in container.values]
    if container is None or all(new is old for new, old in zip(converted, container.values, strict=True)):
        return value
    return container.make(converted)
