"""Collectives on Python values, as torch.distributed's object collectives are, but with nothing pickled.

Values are those of `plain_messages`. Tensors arrive in host memory, whatever the backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DivergenceError
from paceline.plain_messages import MAX_TEXT_BYTES, decode, empty_tensors, encode
from paceline.process_groups import device_of


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
        return _arrived(transfer, device_of(group), classes)
    _give(value, transfer, device_of(group))
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
    dist.all_gather(texts, _text_tensor(text, max(sizes), device), group=group)
    received = (flat[:size].cpu().numpy().tobytes() for flat, size in zip(texts, sizes, strict=True))
    return [decode(one, [], classes) for one in received]


def gather_objects(value: Any, group: dist.ProcessGroup | None, classes: Iterable[type] = ()) -> list[Any] | None:
    """The value of every rank, by rank, on rank 0 of `group`; None on the others. A collective."""
    if group is None:
        return [value]
    if dist.get_rank(group) != 0:
        send_object(value, group, 0)
        return None
    return [value, *(recv_object(group, rank, classes) for rank in range(1, dist.get_world_size(group)))]


def scatter_objects(values: Sequence[Any], group: dist.ProcessGroup | None) -> Any:
    """The value that rank 0 has for this worker; a collective.

    Args:
        values: one for every rank; ignored on all ranks but 0.
    """
    if group is None:
        return values[0]
    if dist.get_rank(group) != 0:
        return recv_object(group, 0)
    for receiver, value in enumerate(values[1:], start=1):
        send_object(value, group, receiver)
    return values[0]


def send_object(value: Any, group: dist.ProcessGroup, destination: int) -> None:
    """Send a value to rank `destination` of `group`, which has to call `recv_object`."""
    _give(value, functools.partial(dist.send, group_dst=destination, group=group), device_of(group))


def recv_object(group: dist.ProcessGroup, source: int, classes: Iterable[type] = ()) -> Any:
    """The value that rank `source` of `group` sends by `send_object`."""
    return _arrived(functools.partial(dist.recv, group_src=source, group=group), device_of(group), classes)


def _give(value: Any, transfer: Callable[[Tensor], object], device: torch.device) -> None:
    """Have the tensors of a message transferred, in the order in which `_arrived` takes them."""
    text, tensors = encode(value)
    transfer(torch.tensor([len(text)], device=device))
    transfer(_text_tensor(text, len(text), device))
    for tensor in tensors:
        transfer(tensor.to(device))


def _arrived(transfer: Callable[[Tensor], object], device: torch.device, classes: Iterable[type]) -> Any:
    """The value of a message; `transfer` fills a tensor."""
    length = torch.empty(1, dtype=torch.int64, device=device)
    transfer(length)
    flat = torch.empty(_checked(int(length)), dtype=torch.uint8, device=device)
    transfer(flat)
    text = flat.cpu().numpy().tobytes()
    tensors = empty_tensors(text)
    for tensor in tensors:
        on_device = tensor.to(device)
        transfer(on_device)
        if on_device is not tensor:
            tensor.copy_(on_device)
    return decode(text, tensors, classes)


def _text_tensor(text: bytes, length: int, device: torch.device) -> Tensor:
    """The text as bytes, padded to `length`."""
    return torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8).to(device)


def _checked(length: int) -> int:
    if not 0 < length <= MAX_TEXT_BYTES:
        raise DivergenceError(f"Another worker announced a message of {length:,} bytes, which no worker sends.")
    return length
