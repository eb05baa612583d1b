"""Process groups that send from host memory, and collectives on Python values, as torch.distributed's object
collectives are, but with nothing pickled.

A message is JSON text, then the memory of the tensors in it; `tensors.flatten` says what it may hold. What a
stranger sends can at worst be a wrong value: unlike a pickle, decoding it runs no code. Tensors arrive in host memory,
whatever the backend.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DivergenceError
from paceline.tensors import flatten, unflatten


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor has to be for the backend of `group` to send it: host memory wherever the backend can."""
    kinds = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


@functools.cache
def open_host_group(world: dist.ProcessGroup, purpose: str, timeout_s: float) -> dist.ProcessGroup:  # noqa: ARG001
    """Open a further group of all workers, for tensors in host memory; a collective. The next run in the process
    uses it again: a group's threads wake a hundred times a second. What is sent for two purposes must not mix."""
    opened: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return opened


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value of rank 0 of `group`, on every worker; a collective. None: this worker is alone."""
    if group is None:
        return value
    transfer = functools.partial(dist.broadcast, group_src=0, group=group)
    if dist.get_rank(group) != 0:
        return decode(transfer_message(None, transfer, device_of(group)))
    transfer_message(encode(value), transfer, device_of(group))
    return value


def all_gather_objects(value: Any, group: dist.ProcessGroup | None, classes: Sequence[type] = ()) -> list[Any]:
    """The value of every rank, by rank, on every worker; a collective. For small values: all messages are sent in the
    length of the longest. `classes`: the dataclasses that the value may contain."""
    return gather_objects(value, group, classes, to_all=True) or []


def gather_objects(
    value: Any, group: dist.ProcessGroup | None, classes: Sequence[type] = (), *, to_all: bool = False
) -> list[Any] | None:
    """As `all_gather_objects`, on rank 0 of `group`; None on the others, unless the values go `to_all`."""
    if group is None:
        return [value]
    device = device_of(group)
    message = encode(value, classes)
    length = torch.tensor([len(message)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    own = torch.cat([message, message.new_zeros(max(sizes) - len(message))]).to(device)
    arrives = to_all or dist.get_rank(group) == 0
    messages = [torch.empty_like(own) for _ in sizes] if arrives else None
    if messages is not None and to_all:
        dist.all_gather(messages, own, group=group)
    else:
        dist.gather(own, messages, group=group, group_dst=0)
    return messages and [decode(one[:size].cpu(), classes) for one, size in zip(messages, sizes, strict=True)]


def transfer_message(message: Tensor | None, transfer: Callable[[Tensor], object], device: torch.device) -> Tensor:
    """Have the length of a message transferred, then the message, which is returned; None: `transfer` receives it."""
    length = torch.tensor([0 if message is None else len(message)], device=device)
    transfer(length)
    found = torch.empty(int(length), dtype=torch.uint8, device=device) if message is None else message.to(device)
    transfer(found)
    return found.cpu()


def encode(value: Any, classes: Sequence[type] = ()) -> Tensor:
    """The message of `value`, bytes in host memory: the length of its text in eight bytes, the text, the memory of its
    tensors. Raises TypeError for a value of a type that messages do not have."""
    plain, named = flatten(value, classes=classes)
    heads = [[name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in named.items()]
    text = json.dumps([plain, heads]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "big") + text), dtype=torch.uint8)
    return torch.cat([head, *(_memory(tensor.cpu().contiguous()) for tensor in named.values())])


def decode(message: Tensor, classes: Sequence[type] = ()) -> Any:
    """The value that was encoded. Raises DivergenceError for a message that `encode` did not make, or another class."""
    tensors = {}
    try:
        stop = 8 + int.from_bytes(message[:8].numpy().tobytes(), "big")
        plain, heads = json.loads(message[8:stop].numpy().tobytes())
        for name, dtype, shape in heads:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            start, stop = stop, stop + tensors[name].nbytes
            _memory(tensors[name]).copy_(message[start:stop])
        return unflatten(plain, tensors.__getitem__, classes)
    except Exception as problem:
        raise DivergenceError(
            f"A message from another worker cannot be read ({type(problem).__name__}: {problem})."
        ) from None


def _memory(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
