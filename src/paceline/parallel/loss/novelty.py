"""Detects values of batches and operations of a loss that have not occurred before; its loss is then examined again.

Whether a loss couples samples is found out in its first step. Padding may come later, a mask may hide its first token,
a term may be added after a warm-up: such a thing shows in the values of the batch, or in the operations that the loss
is computed by, in the very step in which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.containers import tensors, with_tensors
from paceline.samples import may_show_validity

_MOST_NODES = 24
"""The number of operations of the autograd graph that are compared, from the loss on."""
MOST_LOOKS = 64
"""After this many findings no more are reported: they are assumed to come from random values."""

Facts = dict[tuple[int, str], float]
"""The largest value seen of each fact, by the number of a tensor in a batch and the fact's name; more is new."""


class Novelty:
    """The facts and operations that have occurred in one loss function's passes on this worker."""

    def __init__(self) -> None:
        self._known: Facts = {}
        self._graphs: set[tuple[str, ...]] = set()
        self._num_looks = 0
        self._on_its_way: tuple[torch.cuda.Event, list[tuple[int, str]], Tensor] | None = None

    def learn(self, content: Any) -> bool:
        """Whether a fact about a batch is new; for tensors on a GPU, about the batch before: the CPU does not wait."""
        found = self._arrived()
        keys: list[tuple[int, str]] = []
        on_gpu: list[Tensor] = []
        for number, tensor in enumerate(tensors(with_tensors(content))):
            for name, sign, value in _facts(tensor):
                if tensor.is_cuda:
                    keys.append((number, name))
                    on_gpu.append(value.double() if sign > 0 else -value.double())
                else:
                    found |= self._is_more((number, name), sign * float(value))
        if on_gpu:
            values = torch.stack(on_gpu).to("cpu", non_blocking=True)
            sent = torch.cuda.Event()
            sent.record()
            self._on_its_way = sent, keys, values
        return found and self._may_look()

    def _arrived(self) -> bool:
        """Whether a fact that was being copied from a GPU is new."""
        if self._on_its_way is None:
            return False
        sent, keys, values = self._on_its_way
        self._on_its_way = None
        sent.synchronize()  # it was sent before the last step's passes
        found = False
        for key, value in zip(keys, values.tolist(), strict=True):
            found |= self._is_more(key, value)
        return found

    def learn_graph(self, loss: Tensor) -> bool:
        """Whether the loss, a scalar, was computed by other operations than all before; the first are nothing new."""
        graph = _operations(loss)
        if graph in self._graphs:
            return False
        self._graphs.add(graph)
        return len(self._graphs) > 1 and self._may_look()

    def _may_look(self) -> bool:
        self._num_looks += 1
        return self._num_looks <= MOST_LOOKS

    def _is_more(self, key: tuple[int, str], value: float) -> bool:
        if value <= self._known.get(key, -np.inf):
            return False
        self._known[key] = value
        return True


def _facts(tensor: Tensor) -> Iterator[tuple[str, int, Any]]:
    """Name, sign and value of facts about a tensor, computed on its device; new is a larger sign times value."""
    if not may_show_validity(tensor):
        return
    values: Any = tensor.detach() if tensor.requires_grad else tensor
    if not tensor.is_cuda and tensor.dtype != torch.bfloat16:
        values = values.numpy()  # whose functions cost a few microseconds
    if tensor.is_floating_point():
        yield "has zeros", 1, (values == 0).any()
        yield "has values that are no numbers", 1, (values != values).any()
        return
    yield "smallest", -1, values.min()
    yield "largest", 1, values.max()
    if values.ndim > 1 and values.shape[-1] > 1:
        yield "ends in a repetition", 1, (values[..., -1] == values[..., -2]).any()


def _operations(loss: Tensor) -> tuple[str, ...]:
    """The names of the operations next to the loss; a product with zero, as during a warm-up, has a name of its own."""
    found: list[str] = []
    left = [loss.grad_fn]
    seen = set()
    while left and len(found) < _MOST_NODES:
        node: Any = left.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = str(node.name())
        # A factor that is packed is not looked at: to unpack it, activation checkpointing would run layers again.
        is_packed = name == "MulBackward0" and getattr(node._raw_saved_other, "unpack_hook", None) is not None
        if name == "MulBackward0" and not is_packed and _is_zero(node._saved_other):
            name += " by zero"
        found.append(name)
        left += [following for following, _ in node.next_functions]
    return tuple(found)


def _is_zero(factor: Any) -> bool:
    is_number = isinstance(factor, Tensor) and factor.ndim == 0 and not factor.is_cuda
    return is_number and not factor.requires_grad and not float(factor)
