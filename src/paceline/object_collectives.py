"""Collectives on Python values, as torch.distributed's object collectives are, but with nothing pickled.

A message is JSON text, then the memory of the tensors in it. What a stranger sends can at worst be a wrong value:
unlike a pickle, decoding it runs no code. Values are None, booleans, numbers, texts, bytes, lists, tuples, sets,
dictionaries, tensors, torch dtypes, and the dataclasses that the receiver names. Tensors arrive in host memory,
whatever the backend.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DivergenceError
from paceline.process_groups import device_of

MAX_TEXT_BYTES = 1 << 28
"""Longer texts are refused: nothing that workers tell each other as text comes near it."""
_HEAD_BYTES = 1024
"""The first transfer of a message: the length of its text in eight bytes, then the text or its beginning."""


def broadcast_object(value: Any, group: dist.ProcessGroup | None, classes: Iterable[type] = (), source: int = 0) -> Any:
    """The value of rank `source` of `group`, on every worker; a collective. None: this worker is alone.

    Args:
        value: ignored on the other workers.
        classes: the dataclasses that the value may contain.
    """
    if group is None:
        return value
    transfer = functools.partial(dist.broadcast, group_src=source, group=group)
    if dist.get_rank(group) != source:
        return _receive(transfer, device_of(group), classes)
    _send(value, transfer, device_of(group))
    return value


def all_gather_objects(value: Any, group: dist.ProcessGroup | None, classes: Iterable[type] = ()) -> list[Any]:
    """The value of every rank, by rank, on every worker; a collective. For small values: all texts have one length."""
    if group is None:
        return [value]
    device = device_of(group)
    text, tensors = encode(value)
    if tensors:
        raise TypeError("all_gather_objects takes values without tensors and bytes; gather those by other collectives.")
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [_checked(int(size)) for size in lengths]
    texts = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, _as_tensor(text.ljust(max(sizes), b"\0"), device), group=group)
    received = (_as_bytes(flat[:size]) for flat, size in zip(texts, sizes, strict=True))
    return [decode(one, [], classes) for one in received]


def gather_objects(value: Any, group: dist.ProcessGroup | None, classes: Iterable[type] = ()) -> list[Any] | None:
    """The value of every rank, by rank, on rank 0 of `group`; None on the others. A collective."""
    if group is None:
        return [value]
    if dist.get_rank(group) != 0:
        send_object(value, group, 0)
        return None
    return [value, *(recv_object(group, rank, classes) for rank in range(1, dist.get_world_size(group)))]


def send_object(
    value: Any, group: dist.ProcessGroup, destination: int, tag: int = 0, timeout_s: float | None = None
) -> None:
    """Send a value to rank `destination` of `group`, which has to call `recv_object` with this tag.

    Args:
        timeout_s: as in `recv_object`.
    """

    def transfer(tensor: Tensor) -> None:
        _wait(dist.isend(tensor, group=group, group_dst=destination, tag=tag), timeout_s)

    _send(value, transfer, device_of(group))


def recv_object(
    group: dist.ProcessGroup, source: int, classes: Iterable[type] = (), tag: int = 0, timeout_s: float | None = None
) -> Any:
    """The value that rank `source` of `group` sends by `send_object`.

    Args:
        timeout_s: the longest wait for each part of the message, after which the group is of no more use; None: that
            of the group.
    """

    def transfer(tensor: Tensor) -> None:
        _wait(dist.irecv(tensor, group=group, group_src=source, tag=tag), timeout_s)

    return _receive(transfer, device_of(group), classes)


def _wait(work: dist.Work | None, timeout_s: float | None) -> None:
    assert work is not None
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def _send(value: Any, transfer: Callable[[Tensor], object], device: torch.device) -> None:
    """Have the tensors of a message transferred, in the order in which `_receive` takes them."""
    text, tensors = encode(value)
    message = len(text).to_bytes(8, "big") + text
    transfer(_as_tensor(message[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), device))
    if len(message) > _HEAD_BYTES:
        transfer(_as_tensor(message[_HEAD_BYTES:], device))
    for tensor in tensors:
        transfer(tensor.to(device))


def _receive(transfer: Callable[[Tensor], object], device: torch.device, classes: Iterable[type]) -> Any:
    """The value of a message; `transfer` fills a tensor."""
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device=device)
    transfer(head)
    length = _checked(int.from_bytes(_as_bytes(head[:8]), "big"))
    rest = torch.empty(max(0, 8 + length - _HEAD_BYTES), dtype=torch.uint8, device=device)
    if len(rest):
        transfer(rest)
    text = (_as_bytes(head[8:]) + _as_bytes(rest))[:length]
    tensors = [tensor.to(device) for tensor in empty_tensors(text)]
    for tensor in tensors:
        transfer(tensor)
    return decode(text, [tensor.cpu() for tensor in tensors], classes)


def _as_tensor(text: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _as_bytes(flat: Tensor) -> bytes:
    return flat.cpu().numpy().tobytes()


def _checked(length: int) -> int:
    if not 0 < length <= MAX_TEXT_BYTES:
        raise DivergenceError(f"Another worker announced a message of {length:,} bytes, which no worker sends.")
    return length


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """The text of `value`, and the tensors that it refers to by number, contiguous and in host memory.

    Tensors that share memory, such as tied weights, are sent once and are one tensor again when they arrive.

    Raises:
        TypeError: a value of a type that messages do not have.
    """
    found: dict[tuple[object, ...], tuple[int, Tensor]] = {}
    plain = _plain(value, found)
    tensors = [tensor for _, tensor in found.values()]
    heads = [[str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for tensor in tensors]
    return json.dumps({"value": plain, "tensors": heads}).encode(), tensors


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


def _invalid(problem: Exception) -> DivergenceError:
    return DivergenceError(f"A message from another worker cannot be read ({type(problem).__name__}: {problem}).")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'{name}' is no dtype")
    return dtype


# Every value but None, booleans, numbers, texts and lists is an object of one item: a tag and the contents.
def _plain(value: Any, found: dict[tuple[object, ...], tuple[int, Tensor]]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            memory = (value.device, value.data_ptr() or id(value), value.shape, value.stride(), value.dtype)
            if memory not in found:
                found[memory] = len(found), value.detach().cpu().contiguous()
            return {"tensor": found[memory][0]}
        case bytes():
            return {"bytes": value.hex()}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case list():
            return [_plain(item, found) for item in value]
        case tuple():
            return {"tuple": [_plain(item, found) for item in value]}
        case set() | frozenset():
            return {"set": [_plain(item, found) for item in value]}
        case dict():
            return {"dict": [[_plain(key, found), _plain(item, found)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: [_plain(getattr(value, f.name), found) for f in dataclasses.fields(value)]}
    raise TypeError(f"A message cannot hold a {type(value).__name__}.")


def _value(plain: Any, tensors: list[Tensor], classes: dict[str, type]) -> Any:
    if isinstance(plain, list):
        return [_value(item, tensors, classes) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, content),) = plain.items()
    match tag:
        case "tensor":
            return tensors[content]
        case "bytes":
            return bytes.fromhex(content)
        case "dtype":
            return _dtype(content)
        case "tuple":
            return tuple(_value(item, tensors, classes) for item in content)
        case "set":
            return frozenset(_value(item, tensors, classes) for item in content)
        case "dict":
            return {_value(key, tensors, classes): _value(item, tensors, classes) for key, item in content}
    return classes[tag](*(_value(item, tensors, classes) for item in content))
