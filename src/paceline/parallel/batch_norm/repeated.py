"""Weights and biases of all batch norm layers of a model, repeated for the shards of a pass by one call.

A kernel that normalises several shards, each channel of each as a channel of its own, wants a layer's weight and bias
once for each shard. A layer that repeated them itself would take four small kernels a step, two of them to add the
gradients of the shards up again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dtensor_type import is_dtensor
from paceline.parallel.dtensor import alike


def shard_by_shard(widths: Sequence[int], num_shards: int) -> Tensor:
    """Where in a vector that holds, tensor by tensor, `num_shards` times as many values as its width, those of each
    shard are: of shape (num_shards, sum of the widths)."""
    places = torch.arange(num_shards * sum(widths)).split([num_shards * width for width in widths])
    return torch.cat([place.view(num_shards, -1) for place in places], dim=1)


Repeated = tuple[Tensor, tuple[Any, int]]
"""The values of a parameter, once for each shard, and its `source_of` when they were made."""


def source_of(parameter: Tensor) -> tuple[Any, int]:
    """A key that changes when the parameter's values do: its storage and version counter."""
    return parameter.untyped_storage()._cdata, parameter._version


class RepeatedParameters:
    """Repeats the parameters of the norm layers of a model."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        # `fully_shard` reduces gradients layer by layer: it must not get some of them later.
        self._layers = [one for one in layers if not any(is_dtensor(p) for p in one.parameters())]
        self._orders: dict[Any, Tensor] = {}

    def repeated(self, num_shards: int) -> dict[Tensor, Repeated]:
        """Each trained parameter, repeated `num_shards` times; autograd sums the gradients of all layers and shards."""
        if not torch.is_grad_enabled():
            return {}
        own = dict.fromkeys(one for layer in self._layers for one in layer.parameters(recurse=False))
        trained = [one for one in own if type(one) is nn.Parameter and one.requires_grad]
        found: dict[Tensor, Repeated] = {}
        for parameters in alike(trained).values():
            order = self._order(tuple(one.numel() for one in parameters), num_shards, parameters[0].device)
            repeated = _Repeat.apply(order, *parameters)  # type: ignore[no-untyped-call]
            found |= {one: (values, source_of(one)) for one, values in zip(parameters, repeated, strict=True)}
        return found

    def _order(self, widths: tuple[int, ...], num_shards: int, device: torch.device) -> Tensor:
        key = widths, num_shards, device
        if key not in self._orders:
            self._orders[key] = shard_by_shard(widths, num_shards).to(device)
        return self._orders[key]


class _Repeat(torch.autograd.Function):
    """Each of some vectors of one dtype, repeated.

    The order says where the values of each shard are in the vectors that are returned, one after the other.
    """

    @staticmethod
    def forward(ctx: Any, order: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.order, ctx.widths = order, [one.numel() for one in parameters]
        ctx.set_materialize_grads(False)  # a layer that had no part in the loss has no gradient
        whole = torch.cat([one for one in parameters for _ in range(len(order))])
        repeated: tuple[Tensor, ...] = whole.split([len(order) * width for width in ctx.widths])
        return repeated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        known = next((one for one in grads if one is not None), None)
        if known is None:
            return None, *grads
        num_shards = len(ctx.order)
        filled = [
            known.new_zeros(num_shards * width) if one is None else one
            for one, width in zip(grads, ctx.widths, strict=True)
        ]
        sums = torch.cat(filled)[ctx.order].sum(0).split(ctx.widths)
        return None, *(None if one is None else of_shards for one, of_shards in zip(grads, sums, strict=True))
