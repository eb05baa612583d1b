"""Collectives on Python values, as torch.distributed's object collectives are, but with nothing pickled.

A message is JSON text, then the memory of the tensors in it; see `nested_values` for what it may hold. What a stranger
sends can at worst be a wrong value: unlike a pickle, decoding it runs no code. Tensors arrive in host memory, whatever
the backend.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DivergenceError
from paceline.nested_values import flatten, unflatten
from paceline.process_groups import device_of

_HEAD_BYTES = 1024
"""The first transfer of a message: the length of its text in eight bytes, then the text or its beginning."""
_MOST_TEXT_BYTES = 1 << 28
"""Longer texts are refused: nothing that workers tell each other as text comes near it."""


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
    _send(value, transfer, device_of(group), classes)
    return value


def all_gather_objects(value: Any, group: dist.ProcessGroup | None, classes: Iterable[type] = ()) -> list[Any]:
    """The value of every rank, by rank, on every worker; a collective. For small values without tensors: all texts are
    sent in the length of the longest."""
    if group is None:
        return [value]
    device = device_of(group)
    text, tensors = encode(value, classes)
    if tensors:
        raise TypeError("all_gather_objects takes values without tensors; gather those by other collectives.")
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [_checked(int(size)) for size in lengths]
    texts = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, _as_tensor(text.ljust(max(sizes), b"\0"), device), group=group)
    return [decode(_as_bytes(flat[:size]), lambda _: None, classes) for flat, size in zip(texts, sizes, strict=True)]


def gather_objects(value: Any, group: dist.ProcessGroup | None, classes: Iterable[type] = ()) -> list[Any] | None:
    """The value of every rank, by rank, on rank 0 of `group`; None on the others. A collective."""
    if group is None:
        return [value]
    if dist.get_rank(group) != 0:
        send_object(value, group, 0, classes)
        return None
    return [value, *(recv_object(group, rank, classes) for rank in range(1, dist.get_world_size(group)))]


def send_object(
    value: Any,
    group: dist.ProcessGroup,
    destination: int,
    classes: Iterable[type] = (),
    tag: int = 0,
    timeout_s: float | None = None,
) -> None:
    """Send a value to rank `destination` of `group`, which has to call `recv_object` with this tag.

    Args:
        timeout_s: the longest wait for each part of the message, after which the group is of no more use; None: that
            of the group.
    """

    def transfer(tensor: Tensor) -> None:
        _wait(dist.isend(tensor, group=group, group_dst=destination, tag=tag), timeout_s)

    _send(value, transfer, device_of(group), classes)


def recv_object(
    group: dist.ProcessGroup, source: int, classes: Iterable[type] = (), tag: int = 0, timeout_s: float | None = None
) -> Any:
    """The value that rank `source` of `group` sends by `send_object`, with its arguments."""

    def transfer(tensor: Tensor) -> None:
        _wait(dist.irecv(tensor, group=group, group_src=source, tag=tag), timeout_s)

    return _receive(transfer, device_of(group), classes)


def _wait(work: dist.Work | None, timeout_s: float | None) -> None:
    assert work is not None
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def _send(value: Any, transfer: Callable[[Tensor], object], device: torch.device, classes: Iterable[type]) -> None:
    """Have the tensors of a message transferred, in the order in which `_receive` takes them."""
    text, tensors = encode(value, classes)
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

    def received(empty: Tensor) -> Tensor:
        arriving = empty.to(device)
        transfer(arriving)
        return arriving.cpu()

    return decode((_as_bytes(head[8:]) + _as_bytes(rest))[:length], received, classes)


def _as_tensor(text: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _as_bytes(flat: Tensor) -> bytes:
    return flat.cpu().numpy().tobytes()


def _checked(length: int) -> int:
    if not 0 < length <= _MOST_TEXT_BYTES:
        raise DivergenceError(f"Another worker announced a message of {length:,} bytes, which no worker sends.")
    return length


def encode(value: Any, classes: Iterable[type] = ()) -> tuple[bytes, list[Tensor]]:
    """The text of `value`, and the tensors that follow it, contiguous and in host memory. Raises TypeError for a value
    of a type that messages do not have."""
    plain, named = flatten(value, classes=classes)
    heads = [[name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in named.items()]
    return json.dumps([plain, heads]).encode(), [tensor.cpu().contiguous() for tensor in named.values()]


def decode(text: bytes, received: Callable[[Tensor], Any], classes: Iterable[type] = ()) -> Any:
    """The value that was encoded.

    Args:
        received: called with an empty tensor for each of the message, in order; returns it with its values.
        classes: the dataclasses that may be in it.

    Raises:
        DivergenceError: a text that `encode` did not make, or another class.
    """
    try:
        plain, heads = json.loads(text)
        empty = {name: torch.empty(shape, dtype=_dtype(dtype)) for name, dtype, shape in heads}
    except (ValueError, TypeError, AttributeError, RecursionError, RuntimeError) as problem:
        raise _unreadable(problem) from None
    tensors = {name: received(tensor) for name, tensor in empty.items()}
    try:
        return unflatten(plain, tensors.__getitem__, classes)
    except ValueError as problem:
        raise _unreadable(problem) from None


def _unreadable(problem: Exception) -> DivergenceError:
    return DivergenceError(f"A message from another worker cannot be read ({type(problem).__name__}: {problem}).")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'{name}' is no dtype")
    return dtype
