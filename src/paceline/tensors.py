"""Tensors as a run meets them: in a batch and the containers that it consists of, as shards of DTensors, and by name in
JSON, of which checkpoints and messages between workers consist."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# --- a worker's batch: its virtual shards ---


Apply = Callable[[Callable[[Any], Any], tuple[Any, ...]], tuple[Any, ...]]
"""apply(function, shards): what a function returns for each shard."""


@dataclass(frozen=True)
class Batch:
    """The virtual shards of one global batch that this worker computes, each collated by itself.

    How many they are depends on the number of workers; what is in each of them does not. The loss function is called
    with one after the other.
    """

    shards: tuple[Any, ...]
    """The content of each of this worker's shards."""
    sizes: tuple[int, ...]
    """How many samples are in each of them."""
    apply: Apply = field(default=lambda function, shards: tuple(map(function, shards)), repr=False, compare=False)

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def __iter__(self) -> Iterator[Any]:
        """The content of one shard after the other."""
        return iter(self.shards)

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """A batch with `function` applied to each shard's content; what it draws is the shard's own."""
        return replace(self, shards=self.apply(function, self.shards))


# --- what a shard may be made of ---


@dataclass(frozen=True)
class Container:
    """A container that was taken apart."""

    keys: tuple[Any, ...]
    """A mapping's keys, the numbers of a sequence's values, or the names of fields."""
    values: tuple[Any, ...]
    make: Callable[[Sequence[Any]], Any]
    """A container of the same type with other values."""


def open_container(value: Any, *, in_objects: bool = False) -> Container | None:
    """A dictionary or other mapping that can be changed, a list, tuple, NamedTuple, dataclass or attrs class, taken
    apart by one level; with `in_objects`, for what a model returns, any other object with attributes, too. Else None.
    """
    kind: Any = type(value)
    if isinstance(value, MutableMapping):
        return Container(tuple(value), tuple(value.values()), lambda made: _mapping_like(value, made))
    if isinstance(value, PackedSequence):  # its batch sizes stay in host memory
        inside = value.data, (value.sorted_indices, value.unsorted_indices)
        return Container(("data", "orders"), inside, lambda made: PackedSequence(made[0], value.batch_sizes, *made[1]))
    if isinstance(value, list | tuple):
        names = getattr(kind, "_fields", range(len(value)))
        return Container(tuple(names), tuple(value), getattr(kind, "_make", kind))
    if isinstance(value, type | nn.Module):
        return None
    fields: Any = dataclasses.fields(value) if dataclasses.is_dataclass(value) else getattr(kind, "__attrs_attrs__", ())
    names = [field.name for field in fields if hasattr(value, field.name)]
    if in_objects and not fields and not callable(value):
        names = [*getattr(value, "__dict__", ())]

    def make(values: Sequence[Any]) -> Any:
        made = copy.copy(value)  # the constructor may want other arguments
        for name, one in zip(names, values, strict=True):
            object.__setattr__(made, name, one)
        return made

    return Container(tuple(names), tuple(getattr(value, name) for name in names), make) if names else None


def _mapping_like(mapping: MutableMapping[Any, Any], values: Sequence[Any]) -> MutableMapping[Any, Any]:
    new = copy.copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # its entries are its attributes
        new.__dict__ = new  # type: ignore[assignment]
    for key, value in zip(mapping, values, strict=True):
        new[key] = value
    return new


def map_tensors(value: Any, convert: Callable[[Tensor], Any], *, in_objects: bool = False) -> Any:
    """`value` with every tensor in it converted, however nested; what is in unknown objects stays as it is."""
    if isinstance(value, Tensor):
        return convert(value)
    container = open_container(value, in_objects=in_objects)
    if container is None:
        return value
    converted = [map_tensors(one, convert, in_objects=in_objects) for one in container.values]
    is_same = all(new is old for new, old in zip(converted, container.values, strict=True))
    return value if is_same else container.make(converted)


def tensors(value: Any, *, in_objects: bool = False) -> Iterator[Tensor]:
    """Every tensor in `value`, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif (container := open_container(value, in_objects=in_objects)) is not None:
        for one in container.values:
            yield from tensors(one, in_objects=in_objects)


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """`value` with every tensor in it on `device`; floating ones in float64 if that is `dtype`."""

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype == torch.float64 and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, non_blocking=True)

    return map_tensors(value, move)


# --- DTensors. A process without any loads nothing of them, which takes as long as half of torch ---


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor; none can exist in a process that has not loaded their module."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_shard(tensor: Tensor) -> Tensor:
    """This worker's shard of `tensor`, in the shape of the shard, or all of a plain tensor; shares its memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def shard_slice(like: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets of this worker's shard in the full tensor, and its sizes, along each dimension."""
    (chunk,) = like.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


# --- nested values as JSON and named tensors, and back. Nothing is ever written that could run code when it is read ---


_KINDS = ("tensor", "tuple", "counter", "pairs", "object")
"""Keys of the one-entry objects that stand for values that JSON lacks."""


def flatten(value: Any, path: str = "", classes: Sequence[type] = ()) -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON, and its tensors by name.

    Tensors that share one memory, such as tied weights, have one name and are one tensor again after reading. Raises
    `TypeError` for a value of another type; the message says where.

    Args:
        path: that of `value` itself, with which the names of tensors begin.
        classes: the dataclasses that may be in it.
    """
    named: dict[str, Tensor] = {}
    known: dict[object, str] = {}

    def name(tensor: Tensor, path: str) -> str:
        memory = memory_of(tensor)
        if memory in known:
            return known[memory]
        while path in named:  # "a/b" is a key too, and b in a
            path += "'"
        named[path] = tensor.detach()
        if memory is not None:
            known[memory] = path
        return path

    def plain(value: Any, path: str) -> Any:
        def inside(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
            return [(key, plain(item, f"{path}/{key}" if path else str(key))) for key, item in items]

        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return plain(value.item(), path)
            case Tensor():
                return {"tensor": name(value, path)}
            case list() | tuple():
                items = [item for _, item in inside(enumerate(value))]
                return items if isinstance(value, list) else {"tuple": items}
            case Mapping() if all(isinstance(key, str | int) for key in value):
                kind = "counter" if isinstance(value, Counter) else "pairs"
                is_json = kind == "pairs" and all(isinstance(key, str) for key in value) and not _is_kind(value)
                return dict(inside(value.items())) if is_json else {kind: inside(value.items())}
        if type(value) in classes:
            return {"object": [type(value).__name__, dict(inside(vars(value).items()))]}
        raise TypeError(
            f"the value at '{path}' is a {type(value).__name__}; it should consist of tensors, numbers, texts, and "
            "lists and dictionaries of these"
        )

    return plain(value, path), named


def unflatten(plain: Any, tensor_of: Callable[[str], Any], classes: Sequence[type] = ()) -> Any:
    """The value that `flatten` was given. Raises `ValueError` where `plain` was not made by `flatten`, or is of another
    class.

    Args:
        tensor_of: returns a tensor, or what stands for one, by its name; a KeyError if there is none.
        classes: the dataclasses that may be in it.
    """
    kinds = {kind.__name__: kind for kind in classes}

    def whole(plain: Any) -> Any:
        match plain:
            case list():
                return [whole(item) for item in plain]
            case dict() if not _is_kind(plain):
                return {key: whole(item) for key, item in plain.items()}
            case {"tensor": str(name)}:
                return tensor_of(name)
            case {"tuple": list(items)}:
                return tuple(whole(item) for item in items)
            case {"counter": list(pairs)}:
                return Counter({key: whole(item) for key, item in pairs})
            case {"pairs": list(pairs)}:
                return {key: whole(item) for key, item in pairs}
            case {"object": [str(name), dict(fields)]}:
                return kinds[name](**{key: whole(item) for key, item in fields.items()})
            case dict():
                raise ValueError(f"there is a '{next(iter(plain))}' that is none")
        return plain

    try:
        return whole(plain)
    except (KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"{problem} is missing, or not what it should be") from None


def _is_kind(value: Mapping[Any, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in _KINDS


def memory_of(tensor: Tensor) -> object:
    """Equal for tensors that share memory; None where workers could not agree on it (shards may be empty)."""
    if is_dtensor(tensor) or not tensor.numel() or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
