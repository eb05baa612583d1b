"""What the layers of a model cost, from one forward pass on the meta device: shapes without values.

A layer here is a block of the model, at which a stage of a pipeline may begin. What happens until the next one begins
counts as this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ModelError, reason_of
from paceline.parallel.block_calls import observed_by, watch
from paceline.parallel.blocks import blocks_of, elements_of_lists
from paceline.parallel.tensor_plan import tensor_plan_of
from paceline.spec.forecast import LayerCost, ModelCost
from paceline.tensors import map_tensors, tensors

_MOST_TENSOR_WORKERS = 64
_REPLICATED_FRACTION = 10 / 34
"""The fraction of a divided layer's activations that tensor groups do not divide (Korthikanti et al. 2022)."""


def trace_model(build: Callable[[], nn.Module], sample: Any, num_samples: int = 2) -> ModelCost:
    """The costs of a model for one sample, by layer; their unit of time is a floating-point operation of the forward
    pass.

    Behind the model stands a loss that keeps as much as the model's output, as cross entropy does, and needs twice as
    much in its backward pass. Tensor parallelism divides what the model's own tensor plan says. Raises `ModelError`
    where the model needs values of its tensors, when it is built or in the forward pass.

    Args:
        sample: one of `num_samples` like it, with which the model is tried on the meta device.
    """
    inputs = map_tensors(default_collate([sample] * num_samples), lambda tensor: tensor.to("meta"))
    try:
        with torch.device("meta"):
            model = build()
        plan, num_slices = _tensor_plan(model)
        counts = _Counts(model)
        watch(blocks_of(model) or {"model": model})
        with (
            counts.flops,
            observed_by(counts.call),
            torch.autograd.graph.saved_tensors_hooks(counts.keep, lambda tensor: tensor),
            _FusedAttention(counts.keep),
        ):
            output = model(inputs)
    except (NotImplementedError, RuntimeError, ValueError) as problem:
        raise ModelError(
            f"The model cannot be tried without values: {reason_of(problem)}. Name a strategy in place of auto, or "
            "leave trace = True out."
        ) from problem
    counts.end(_num_bytes(output))
    in_lists = {parameter for block in elements_of_lists(model) for parameter in block.parameters()}
    layers = tuple(layer.cost(num_samples, plan, num_slices, in_lists) for layer in counts.layers)
    kept = accumulate(layer.activation_bytes for layer in layers)
    return ModelCost(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes_per_sample=max(before + layer.moment_bytes for before, layer in zip(kept, layers, strict=True)),
        input_bytes=_num_bytes(inputs) / num_samples,
        layers=layers,
    )


def _tensor_plan(model: nn.Module) -> tuple[Mapping[str, str], int]:
    """The model's own tensor plan, and the largest power of two by which it divides; empty and 1: it has none."""
    plan: Mapping[str, str] = {}
    degree = 1
    with suppress(ModelError):
        while degree < _MOST_TENSOR_WORKERS:
            plan = tensor_plan_of(model, None, 2 * degree)
            degree *= 2
    return plan, degree


def _num_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(value, in_objects=True))


@dataclass
class _Layer:
    """What has been counted of a layer, for all samples of the pass."""

    name: str = ""
    may_begin: bool = True
    parameters: list[nn.Parameter] = field(default_factory=list)
    tied_bytes: int = 0
    flops: int = 0
    kept_bytes: int = 0
    largest_bytes: int = 0
    """The size of the largest tensor with a gradient that is kept, or given to the layer."""
    output_bytes: int = 0

    def cost(
        self, num_samples: int, plan: Mapping[str, str], num_slices: int, in_lists: Container[nn.Parameter]
    ) -> LayerCost:
        """
        Args:
            plan: the model's tensor plan, of which each module sums once, forward or backward.
            num_slices: of the layers that it divides.
            in_lists: parameters of blocks that stand in lists of layers.
        """
        styles = [style for name, style in plan.items() if f"{name}.".startswith(f"{self.name}.")]
        return LayerCost(
            name=self.name,
            time_s=self.flops / num_samples,
            parameter_bytes=sum(parameter.nbytes for parameter in self.parameters),
            activation_bytes=self.kept_bytes / num_samples,
            output_bytes=self.output_bytes / num_samples,
            may_begin=self.may_begin,
            num_tensor_slices=num_slices if styles else 1,
            num_all_reduces=sum(not style.startswith("heads") for style in styles),
            replicated_fraction=_REPLICATED_FRACTION if "colwise" in styles else 1.0,
            # The gradients of the output and of the largest tensor inside: others come when these have gone.
            moment_bytes=(self.output_bytes + self.largest_bytes) / num_samples,
            largest_parameter_bytes=max((parameter.nbytes for parameter in self.parameters), default=0),
            tied_bytes=self.tied_bytes,
            root_bytes=sum(parameter.nbytes for parameter in self.parameters if parameter not in in_lists),
        )


class _Counts:
    """What one forward pass of a model shows of its layers."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [_Layer()]
        """The layers in the order of their calls."""
        self.flops = FlopCounterMode(display=False)
        self._counted_flops = 0
        self._kept = {tensor.untyped_storage() for tensor in model.buffers()}  # these are in memory anyway
        self._parameters = {parameter.untyped_storage(): parameter for parameter in model.parameters()}
        self._last_users: dict[nn.Parameter, _Layer] = {}
        self._uncounted = dict.fromkeys(model.parameters())

    def call(self, path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's forward pass: what happens from here on is its layer's."""
        self._count_flops()
        may_begin = all(layer.name != path for layer in self.layers)  # a pipeline cuts before the first call
        if self.layers[0].name:
            self.layers.append(_Layer())
        layer = self.layers[-1]
        layer.name, layer.may_begin = path, may_begin
        layer.parameters = [parameter for parameter in block.parameters() if parameter in self._uncounted]
        for parameter in layer.parameters:
            del self._uncounted[parameter]
        given = (one.nbytes for one in tensors((args, kwargs), in_objects=True) if one.requires_grad)
        layer.largest_bytes = max(given, default=0)
        output = block(*args, **kwargs)
        layer.output_bytes = _num_bytes(output)
        return output

    def end(self, output_bytes: int) -> None:
        """After the pass: the loss keeps as much as the model's output, and makes two gradients of it in backward."""
        self._count_flops()
        last = self.layers[-1]
        for parameter, layer in self._last_users.items():
            if parameter not in {*layer.parameters, *self._uncounted}:
                layer.tied_bytes += parameter.nbytes
        last.parameters += self._uncounted
        last.kept_bytes += output_bytes
        last.output_bytes = output_bytes
        last.largest_bytes = max(last.largest_bytes, output_bytes)

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor is kept for backward."""
        storage, layer = tensor.untyped_storage(), self.layers[-1]
        if storage in self._parameters:
            self._last_users[self._parameters[storage]] = layer
        elif storage not in self._kept:
            self._kept.add(storage)
            layer.kept_bytes += storage.nbytes()
            layer.largest_bytes = max(layer.largest_bytes, storage.nbytes())
        return tensor

    def _count_flops(self) -> None:
        total = self.flops.get_total_flops()
        self.layers[-1].flops += total - self._counted_flops
        self._counted_flops = total


class _FusedAttention(TorchFunctionMode):
    """Attention keeps what it is given, as fused kernels do: on the meta device torch takes it apart, and keeps the
    weight of every token for every other one."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._keep = keep

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*given[0], **given[1])
        for tensor in tensors(given):
            self._keep(tensor)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return func(*given[0], **given[1])
