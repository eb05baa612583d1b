"""What a batch may be made of: containers of tensors, taken apart one level at a time and made again as the same type.

Mappings, dataclasses, attrs classes, NamedTuples, lists and tuples.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Container:
    """A container that was taken apart."""

    places: tuple[str, ...]
    """Where in the container each value is: "['x']", "[0]" or ".field"."""
    values: tuple[Any, ...]
    make: Callable[[Sequence[Any]], Any]
    """A container of the same type with other values."""


def open_container(value: Any) -> Container | None:
    """`value` taken apart by one level; None if it is not a container."""
    if isinstance(value, Mapping):
        places = tuple(f"[{key!r}]" for key in value)
        return Container(places, tuple(value.values()), lambda made: _mapping_like(value, made))
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
        kind: Any = type(value)
        return Container(tuple(f".{name}" for name in value._fields), value, lambda made: kind(*made))
    if isinstance(value, list | tuple):
        return Container(tuple(f"[{number}]" for number in range(len(value))), tuple(value), type(value))
    fields: Any = getattr(type(value), "__attrs_attrs__", ())
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else fields
    return _record(value, [field.name for field in fields if hasattr(value, field.name)]) if fields else None


def _mapping_like(mapping: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    entries = dict(zip(mapping, values, strict=True))
    if type(mapping) is dict:
        return entries
    if not isinstance(mapping, MutableMapping):
        constructor: Any = type(mapping)
        return constructor(entries)
    new = copy.copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # its entries are its attributes
        new.__dict__ = new  # type: ignore[assignment]
    for key, value in entries.items():
        new[key] = value
    return new


def _record(record: Any, names: Sequence[str]) -> Container:
    """An object with these attributes."""

    def make(values: Sequence[Any]) -> Any:
        # Not by the constructor, which may want other arguments, and would compute anew what is cut already.
        made = copy.copy(record)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return Container(tuple(f".{name}" for name in names), tuple(getattr(record, name) for name in names), make)


def open_object(value: Any) -> Container | None:
    """As `open_container`, and any other object that has attributes; for what a model returns."""
    container = open_container(value)
    is_record = hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | PackedSequence)
    return _record(value, [*vars(value)]) if container is None and is_record and not callable(value) else container


Open = Callable[[Any], Container | None]


def map_tensors(value: Any, convert: Callable[[Tensor], Any], opened: Open = open_container) -> Any:
    """`value` with every tensor in it converted, however nested; what is in unknown objects stays as it is."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, PackedSequence):
        data = convert(value.data)
        # Its batch sizes stay in host memory; the order of its sequences goes with the data, as integers.
        orders = [one if one is None else one.to(data.device) for one in (value.sorted_indices, value.unsorted_indices)]
        return value if data is value.data else PackedSequence(data, value.batch_sizes, *orders)
    return _map(value, lambda one: map_tensors(one, convert, opened), opened)


def tensors(value: Any, opened: Open = open_container) -> Iterator[Tensor]:
    """Every tensor in `value`, however nested."""
    if isinstance(value, Tensor | PackedSequence):
        yield value if isinstance(value, Tensor) else value.data
    elif (container := opened(value)) is not None:
        for one in container.values:
            yield from tensors(one, opened)


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
