"""What pipeline stages send each other, described in JSON: reading a description runs no code of the sender."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.errors import ModelError
from paceline.parallel.memory_order import ALIGNMENT_BYTES, inverse

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class TensorForm:
    """The properties of a tensor that its receiver must know beforehand.

    A received tensor lies in memory as the sent one did, since the order of random numbers, and the last bits of sums
    and products, depend on that.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] = ()
    """Empty: those of a contiguous tensor."""
    offset: int = 0
    """How many elements behind a multiple of 64 bytes it begins."""
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        shape, strides = tuple(tensor.shape), tensor.stride()
        offset = tensor.storage_offset() * tensor.element_size() % ALIGNMENT_BYTES // tensor.element_size()
        return cls(shape, tensor.dtype, () if strides == _contiguous(shape) else strides, offset, tensor.requires_grad)

    @property
    def gradient(self) -> TensorForm:
        """The form of the tensor's gradient, which lies in memory in the same order, without gaps."""
        if not self.strides:
            return TensorForm(self.shape, self.dtype)
        order = self._order
        packed = _contiguous(tuple(self.shape[dim] for dim in order))
        return TensorForm(self.shape, self.dtype, tuple(packed[place] for place in inverse(order)))

    def lies_like(self, other: TensorForm) -> bool:
        return (self.strides, self.offset) == (other.strides, other.offset)

    def pack(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of the values of a tensor of this form, in the order in which they lie, repeated ones
        once; a view wherever possible."""
        if not self.strides:
            return tensor.contiguous()
        return tensor[tuple(slice(length) for length in self._distinct)].permute(self._order).contiguous()

    def packed(self, device: torch.device) -> Tensor:
        """An empty tensor of the shape and dtype that `pack` returns."""
        order, distinct = self._order, self._distinct
        return torch.empty([distinct[dim] for dim in order], dtype=self.dtype, device=device)

    def unpack(self, packed: Tensor) -> Tensor:
        """The tensor whose packed values these are; in their memory wherever possible."""
        if not self.strides and not self.offset:
            return packed
        strides, distinct, order = self.strides or _contiguous(self.shape), self._distinct, self._order
        values = packed.permute(inverse(order))
        triples = zip(distinct, values.stride(), strides, strict=True)
        if not self.offset and all(length == 1 or has == wanted for length, has, wanted in triples):
            return packed.as_strided(self.shape, strides)
        span = 1 + sum((length - 1) * stride for length, stride in zip(distinct, strides, strict=True))
        place = packed.new_empty(self.offset + max(span, 0))
        place.as_strided(distinct, strides, self.offset).copy_(values)
        return place.as_strided(self.shape, strides, self.offset)

    @property
    def _order(self) -> list[int]:
        """The dimensions as they lie in memory, outermost first."""
        strides = self.strides or _contiguous(self.shape)
        return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)

    @property
    def _distinct(self) -> tuple[int, ...]:
        """The shape without repetitions."""
        if not self.strides:
            return self.shape
        return tuple(min(n, 1) if stride == 0 else n for n, stride in zip(self.shape, self.strides, strict=True))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()


@dataclass(frozen=True)
class Outline:
    """What all layers before a cut returned, without the values: a stage goes through their calls as well.

    Described once, with the first message of a kind.
    """

    outputs: list[Any] = field(compare=False)
    """Outputs of each layer, with a `TensorForm` instead of every tensor."""


@dataclass(frozen=True)
class NotSent:
    """In place of what no message can carry, such as a cache of keys and values in the model's output."""

    kind: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError(
            f"The model's output holds a {self.kind}, which only the last stage of the pipeline has: use its tensors, "
            "or choose another strategy."
        )


@dataclass(frozen=True)
class MessageForm:
    """A message: tensors, which are sent, and other values, which the description itself holds."""

    values: list[Any]
    """The values, with a `TensorForm` in the place of every tensor, however deeply nested."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> tuple[MessageForm, list[Tensor]]:
        """The form of some values, and the tensors among them."""
        tensors = [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]
        return cls(pytree.tree_map_only(Tensor, TensorForm.of, list(values))), tensors

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in pytree.tree_leaves(self.values) if isinstance(leaf, TensorForm)]

    @property
    def gradients(self) -> list[TensorForm]:
        """The gradients that come back."""
        return [form.gradient for form in self.tensors if form.requires_grad]

    def filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values, with these tensors."""
        rest = iter(tensors)
        filled: list[Any] = pytree.tree_map_only(TensorForm, lambda _: next(rest), self.values)
        return filled

    def to_plain(self) -> list[Any]:
        """Encode the description as JSON.

        Raises:
            ModelError: a value is neither a tensor, number, text, size, dtype or device nor a container of such.
        """
        return [_to_plain(value) for value in self.values]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> MessageForm:
        return cls([_from_plain(value) for value in plain])


def _to_plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, TensorForm):
        return {"tensor": [value.shape, str(value.dtype), value.strides, value.offset, value.requires_grad]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value)}
    if isinstance(value, NotSent):
        return {"left out": value.kind}
    if isinstance(value, Outline):
        return {"outline": [_to_plain(output) for output in value.outputs]}
    container = pytree.SUPPORTED_NODES.get(pytree._get_node_type(value))
    if container is None:
        raise ModelError(
            f"A {type(value).__name__} would have to be sent from one stage of the pipeline to the next, which takes "
            "tensors, numbers and texts; cut the model elsewhere (pipeline.cuts)."
        )
    children, context = container.flatten_fn(value)
    # Of a named tuple, torch's context is its class.
    context = None if isinstance(context, type) else context
    return {
        "container": [type(value).__module__, type(value).__qualname__, context],
        "values": [_to_plain(child) for child in children],
    }


def _from_plain(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        shape, dtype, strides, offset, requires_grad = plain["tensor"]
        return TensorForm(tuple(shape), _DTYPES[dtype], tuple(strides), offset, requires_grad)
    if "dtype" in plain:
        return _DTYPES[plain["dtype"]]
    if "device" in plain:
        return torch.device(plain["device"])
    if "left out" in plain:
        return NotSent(plain["left out"])
    if "outline" in plain:
        return Outline([_from_plain(output) for output in plain["outline"]])
    module, name, context = plain["container"]
    kind = operator.attrgetter(name)(sys.modules[module])
    # Of the classes that are loaded here, none but a container is ever called.
    if pytree.is_namedtuple_class(kind):
        return kind(*map(_from_plain, plain["values"]))
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(map(_from_plain, plain["values"]), context)


def what_can_be_sent(value: Any) -> Any:
    """The value with a `NotSent` in place of each object that is no tensor, number or text."""

    def check(leaf: Any) -> Any:
        is_plain = leaf is None or type(leaf) in (bool, int, float, str)
        is_plain = is_plain or isinstance(leaf, Tensor | torch.dtype | torch.device)
        return leaf if is_plain else NotSent(type(leaf).__name__)

    return pytree.tree_map(check, value)


def to_bytes(plain: Any) -> Tensor:
    """Encode a JSON value as [num_bytes] uint8."""
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def from_bytes(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
