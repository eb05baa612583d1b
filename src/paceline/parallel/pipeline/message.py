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
from paceline.parallel.memory_order import memory_order

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class TensorForm:
    """The properties of a tensor that its receiver must know beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()
    """The dimensions as they lie in memory, outermost first; empty: in their own order. Random numbers are drawn in
    that order."""
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        order = () if tensor.is_contiguous() else tuple(memory_order(tensor)[0])
        return cls(tuple(tensor.shape), tensor.dtype, order, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        order = self.order or tuple(range(len(self.shape)))
        back = sorted(range(len(order)), key=order.__getitem__)
        return torch.empty([self.shape[dim] for dim in order], dtype=self.dtype, device=device).permute(back)

    def in_memory_order(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of such a tensor's values in the order in which they lie; a view wherever possible."""
        return tensor.permute(self.order).contiguous() if self.order else tensor.contiguous()


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
    """With a `TensorForm` in the place of every tensor, however nested."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> tuple[MessageForm, list[Tensor]]:
        """The form of some values, and the tensors among them."""
        tensors = [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]
        return cls(pytree.tree_map_only(Tensor, TensorForm.of, list(values))), tensors

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in pytree.tree_leaves(self.values) if isinstance(leaf, TensorForm)]

    @property
    def differentiable(self) -> list[TensorForm]:
        """The tensors that a gradient comes back for."""
        return [form for form in self.tensors if form.requires_grad]

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
        return {"tensor": [value.shape, str(value.dtype), value.order, value.requires_grad]}
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
        shape, dtype, order, requires_grad = plain["tensor"]
        return TensorForm(tuple(shape), _DTYPES[dtype], tuple(order), requires_grad)
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
    """Encode JSON as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def from_bytes(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
