"""Linear layers, embeddings and dropout of which every worker holds and computes a slice.

A layer becomes one of these in place: it keeps its name, hooks and attributes and changes its class. Its parameters
are DTensors; forward computes on their local slices, so uneven slices work, what stays whole stays a plain tensor, and
fully_shard may cut the parameters again along another axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.parallel.tensor.exchange import (
    Exchange,
    all_gather,
    all_reduce,
    local_slice,
    redistribute_rows,
    sum_gradient,
)
from paceline.parallel.tensor.sequence_region import drop_slice
from paceline.parallel.tensor.slices import slice_of

Output = Callable[[Tensor, Tensor | None], Tensor]
"""Makes the output of a layer from this worker's term of it and the bias."""


class SharedInput:
    """The input collective of several layers that take the same tensor, so that it is done once."""

    def __init__(self, take: Exchange, num_layers: int) -> None:
        self._take = take
        self._num_layers = num_layers
        self._held: tuple[Tensor, Tensor] | None = None
        self._num_to_come = 0

    def __call__(self, given: Tensor) -> Tensor:
        if self._held is None or self._held[0] is not given:
            self._held, self._num_to_come = (given, self._take(given)), self._num_layers
        taken = self._held[1]
        self._num_to_come -= 1
        if not self._num_to_come:  # what is held would keep the step's activations alive
            self._held = None
        return taken


class ColumnLinear(nn.Linear):
    """Every worker computes its own output features: (..., in) -> (..., own slice of out), or all of them gathered."""

    axis: DeviceMesh
    take_input: Exchange
    give_output: Exchange
    num_blocks: int
    """More than one: the output is that many layers' side by side, and a slice is a slice of each."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = local_slice(self.weight), None if self.bias is None else local_slice(self.bias)
        if self.num_blocks > 1:
            weight = redistribute_rows(weight, self.num_blocks, self.axis)
            bias = None if bias is None else redistribute_rows(bias, self.num_blocks, self.axis)
        return self.give_output(F.linear(self.take_input(input), weight, bias))


class RowLinear(nn.Linear):
    """Every worker multiplies the input features it has: (..., own slice of in) -> (..., out), summed, plus the bias.

    In a sequence-parallel region it returns the worker's own positions: (..., own slice of positions, out).
    """

    name: str
    take_input: Exchange
    give_output: Output

    def forward(self, input: Tensor) -> Tensor:
        weight, own = local_slice(self.weight), self.take_input(input)
        if own.shape[-1] != weight.shape[1]:
            raise ModelError(
                f"'{self.name}', a linear layer of {self.in_features} input features, was given {own.shape[-1]} of "
                f"them instead of this worker's {weight.shape[1]}: the layer before it does not leave its features "
                "divided; take both out of the tensor plan, or make this one rowwise_split_input."
            )
        return self.give_output(F.linear(own, weight), self.bias)


class LocalDropout(nn.Dropout):
    """Dropout on this worker's features of (..., length): draws the mask of all of them, and uses its own slice."""

    axis: DeviceMesh
    length: int

    def forward(self, input: Tensor) -> Tensor:
        return drop_slice(input, -1, self.length, self.p, self.axis) if self.training else input


class VocabularyEmbedding(nn.Embedding):
    """Every worker looks up the words it holds: indices (...) -> (..., width), summed over workers."""

    axis: DeviceMesh

    def forward(self, input: Tensor) -> Tensor:
        weight = local_slice(self.weight)
        start, stop = slice_of(self.num_embeddings, self.axis.size(), self.axis.get_local_rank())
        is_own = (input >= start) & (input < stop)
        if input.device.type == "cpu" and not bool(((input >= 0) & (input < self.num_embeddings)).all()):
            raise IndexError("index out of range in self")  # torch's words; no worker holds that one
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding = self.padding_idx - start
        found = F.embedding((input - start).where(is_own, 0), weight, padding)
        # Not a product with 0: another word's row may hold an infinity.
        return all_reduce(found.where(is_own.unsqueeze(-1), 0), None, self.axis)


class TiedClassifier(TorchFunctionMode):
    """A mode in which the product of a plain tensor and an embedding's matrix is computed by vocabulary and gathered.

    A model that uses its embedding as classifier too calls no layer for it: F.linear(x, embedding.weight), or
    x @ embedding.weight.T.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__()
        self._axis = axis

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        product = tied_product(func, args, kwargs or {})
        if product is not None and product.is_by_output and isinstance(product.matrix, DTensor):
            own = product.compute(sum_gradient(product.input, self._axis), product.matrix.to_local())
            return all_gather(own, -1, product.num_outputs, self._axis)
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
        """Whether each worker has the part of the matrix that makes some of the outputs."""
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
