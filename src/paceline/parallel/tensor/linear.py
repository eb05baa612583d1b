"""Linear layers and embeddings of which every worker holds and computes a part.

A layer becomes one of these in place: it keeps its name, hooks and attributes and changes its class. Its parameters
are DTensors; forward computes on their local parts, so uneven parts work, what stays whole stays a plain tensor, and
fully_shard may cut the parameters again along another axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.parallel.tensor.axis import Axis, part
from paceline.parallel.tensor.exchange import enter, gather, total, trade_rows
from paceline.parallel.tensor.positions import Positions, drop_own, total_with_bias


def local(parameter: Tensor) -> Tensor:
    """What this worker computes with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Entrance:
    """The door by which several layers take the same input, so that it is gathered, or its gradient summed, once."""

    def __init__(self, enter: Callable[[Tensor], Tensor], num_layers: int = 1) -> None:
        self._enter = enter
        self._num_layers = num_layers
        self._held: tuple[Tensor, Tensor] | None = None
        self._num_to_come = 0

    def __call__(self, given: Tensor) -> Tensor:
        if self._held is None or self._held[0] is not given:
            self._held, self._num_to_come = (given, self._enter(given)), self._num_layers
        entered = self._held[1]
        self._num_to_come -= 1
        if not self._num_to_come:  # what is held would keep the step's activations alive
            self._held = None
        return entered


class ColumnLinear(nn.Linear):
    """Every worker computes its own output features: (..., in) -> (..., own part of out), or all of them gathered."""

    axis: Axis
    entrance: Entrance
    gathers: bool
    num_blocks: int
    """More than one: the output is that many layers' side by side, and a part is a part of each."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        if self.num_blocks > 1:
            weight = trade_rows(weight, self.num_blocks, self.axis)
            bias = None if bias is None else trade_rows(bias, self.num_blocks, self.axis)
        own = F.linear(self.entrance(input), weight, bias)
        return gather(own, -1, self.out_features, self.axis) if self.gathers else own


class RowLinear(nn.Linear):
    """Every worker multiplies the input features it has: (..., own part of in) -> (..., out), summed, plus the bias.

    Of a stretch of positions it returns the worker's own: (..., own part of positions, out).
    """

    axis: Axis
    positions: Positions | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = local(self.weight)
        if input.shape[-1] != weight.shape[1]:
            raise ModelError(
                f"A linear layer of {self.in_features} input features that is shared by {self.axis.degree} workers "
                f"got {input.shape[-1]} of them instead of its own {weight.shape[1]}: the model calls it in another "
                "way than its module's forward does; name it in `whole`."
            )
        return total_with_bias(F.linear(input, weight), self.bias, self.axis, self.positions)


class PartDropout(nn.Dropout):
    """Dropout on this worker's features of (..., length): draws the mask of all of them, and uses its own slice."""

    axis: Axis
    length: int

    def forward(self, input: Tensor) -> Tensor:
        return drop_own(input, -1, self.length, self.p, self.axis) if self.training else input


class VocabularyEmbedding(nn.Embedding):
    """Every worker looks up the words it holds: indices (...) -> (..., width), summed over workers."""

    axis: Axis

    def forward(self, input: Tensor) -> Tensor:
        weight = local(self.weight)
        start, stop = part(self.num_embeddings, self.axis.degree, self.axis.rank)
        is_own = (input >= start) & (input < stop)
        if input.device.type == "cpu" and not bool(((input >= 0) & (input < self.num_embeddings)).all()):
            raise IndexError("index out of range in self")  # torch's words; nobody would hold that one
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding = self.padding_idx - start
        found = F.embedding((input - start).where(is_own, 0), weight, padding)
        # Not a product with 0: another word's row may hold an infinity.
        return total(found.where(is_own.unsqueeze(-1), 0), self.axis)


class TiedClassifier(TorchFunctionMode):
    """Inside, a product of a plain tensor with an embedding's matrix is computed by vocabulary and gathered.

    A model that uses its embedding as classifier too calls no layer for it: F.linear(x, embedding.weight), or
    x @ embedding.weight.T.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self._axis = axis

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        product = tied_product(func, args, kwargs or {})
        if product is not None and product.is_by_output and isinstance(product.matrix, DTensor):
            own = product.compute(enter(product.input, self._axis), product.matrix.to_local())
            return gather(own, -1, product.num_outputs, self._axis)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Product:
    """A matrix product of an input (..., in) with a matrix (out, in), or (in, out) if it is not transposed."""

    input: Tensor
    matrix: Tensor
    is_transposed: bool

    @property
    def num_outputs(self) -> int:
        return self.matrix.shape[0 if self.is_transposed else 1]

    @property
    def is_by_output(self) -> bool:
        """Whether the matrix is shared out so that each worker can compute some of the outputs."""
        return isinstance(self.matrix, DTensor) and self.matrix.placements == (Shard(0 if self.is_transposed else 1),)

    def compute(self, input: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(input, matrix) if self.is_transposed else input @ matrix


_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}


def tied_product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """The call as a product without bias, if it is one."""
    if (
        (func is not F.linear and func not in _PRODUCTS)
        or kwargs
        or len(args) < 2
        or any(arg is not None for arg in args[2:])
    ):
        return None
    input, matrix = cast(tuple[Tensor, Tensor], args[:2])
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or isinstance(input, DTensor):
        return None
    return Product(input, matrix, is_transposed=func is F.linear)
