"""What pipeline stages send each other, described in JSON: reading a description runs no code of the sender."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.errors import ModelError

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class TensorForm:
    """The properties of a tensor that its receiver must know beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_channels_last: bool = False
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        is_channels_last = (
            tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        return cls(tuple(tensor.shape), tensor.dtype, is_channels_last, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        order = torch.channels_last if self.is_channels_last else torch.contiguous_format
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=order)

    def in_memory_order(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of such a tensor's values in the order in which they lie; a view wherever possible."""
        if self.is_channels_last:
            return tensor.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
        return tensor.contiguous()


@dataclass(frozen=True)
class Outline:
    """What all layers before a cut returned, without the values: a stage goes through their calls as well.

    Described once, with the first message of a kind.
    """

    outputs: list[Any] = field(compare=False)
    """Of each layer, with a `TensorForm` in the place of every tensor."""


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
        shape, dtype, *flags = astuple(value)
        return {"tensor": [shape, str(dtype), *flags]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value)}
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
        shape, dtype, *flags = plain["tensor"]
        return TensorForm(tuple(shape), _DTYPES[dtype], *flags)
    if "dtype" in plain:
        return _DTYPES[plain["dtype"]]
    if "device" in plain:
        return torch.device(plain["device"])
    if "outline" in plain:
        return Outline([_from_plain(output) for output in plain["outline"]])
    module, name, context = plain["container"]
    kind = operator.attrgetter(name)(sys.modules[module])
    # Of the classes that are loaded here, none but a container is ever called.
    if pytree.is_namedtuple_class(kind):
        return kind(*map(_from_plain, plain["values"]))
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(map(_from_plain, plain["values"]), context)


def to_bytes(plain: Any) -> Tensor:
    """Encode JSON as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def from_bytes(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
