"""What the layers of a model cost, from one forward and backward pass on the meta device: shapes without values.

A layer here is a block of the model, at which a stage of a pipeline may begin. Hooks tell when the forward pass enters
one and when backward comes to its output; what happens until the next one counts as this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from paceline.containers import map_tensors, open_object, tensors
from paceline.errors import ModelError, reason_of
from paceline.parallel.blocks import blocks_of
from paceline.parallel.live_bytes import LiveBytes
from paceline.parallel.tensor_plan import tensor_plan_of
from paceline.spec.model_cost import Activations, LayerCost, ModelCost

_MOST_TENSOR_WORKERS = 64


def on_paper(build: Callable[[], nn.Module], sample: Any, num_samples: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model of `build` on the meta device, and its arguments for `num_samples` samples like `sample`."""
    with torch.device("meta"):
        model = build()
    inputs = map_tensors(default_collate([sample] * num_samples), lambda tensor: tensor.to("meta"))
    return model, (inputs,)


def trace_model(model: nn.Module, arguments: tuple[Any, ...], num_samples: int) -> ModelCost:
    """The costs of a model on the meta device for one sample, by layer.

    Behind the model stands a loss that keeps as much as the model's output, as cross entropy does, and needs twice as
    much in its backward pass. Tensor parallelism divides what the model's own tensor plan says.

    Args:
        arguments: the model's, for `num_samples` samples, on the meta device.

    Raises:
        ModelError: the forward pass needs values of its tensors.
    """
    plan, num_slices = _tensor_plan(model)
    tracing = _Tracing(plan)
    try:
        output_bytes = tracing.run(model, arguments)
    except (NotImplementedError, RuntimeError) as problem:
        raise ModelError(
            f"The model cannot be tried without values: {reason_of(problem)}. Leave out the trace of the model "
            "(--trace), and name a strategy in place of auto."
        ) from problem
    traced = tracing.layers
    traced[-1].kept_bytes += output_bytes
    traced[-1].moment_bytes = max(traced[-1].moment_bytes, 2 * output_bytes)
    total_flops = sum(layer.flops for layer in traced)
    layers = tuple(layer.cost(num_samples, total_flops, num_slices) for layer in traced)
    kept = accumulate(layer.activation_bytes for layer in layers)
    return ModelCost(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        activations=Activations(
            max(before + layer.moment_bytes for before, layer in zip(kept, layers, strict=True)),
            input_bytes=_num_bytes(arguments) / num_samples,
        ),
        layers=layers,
        flops_per_sample=total_flops / num_samples,
    )


def _tensor_plan(model: nn.Module) -> tuple[Mapping[str, str], int]:
    """The model's own tensor plan, and the largest power of two by which it divides; empty and 1: it has none."""
    plan: Mapping[str, str] = {}
    degree = 1
    while degree < _MOST_TENSOR_WORKERS:
        try:
            plan = tensor_plan_of(model, None, 2 * degree)
        except ModelError:
            break
        degree *= 2
    return plan, degree


def _num_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(value, open_object))


@dataclass
class _Layer:
    """What has been counted of a layer, for all samples of the pass."""

    name: str = ""
    may_begin: bool = True
    flops: int = 0
    parameter_bytes: int = 0
    largest_parameter_bytes: int = 0
    kept_bytes: int = 0
    divided_bytes: int = 0
    """Of `kept_bytes`: what the workers of a tensor group divide."""
    moment_bytes: int = 0
    waiting_bytes: int = 0
    output_bytes: int = 0
    all_reduce_bytes: list[float] = field(default_factory=list)
    is_divided: bool = False

    def cost(self, num_samples: int, total_flops: int, num_slices: int) -> LayerCost:
        """
        Args:
            num_slices: of the layers that tensor parallelism divides.
        """
        num_all_reduces = len(self.all_reduce_bytes)
        return LayerCost(
            name=self.name,
            time_s=self.flops / (total_flops or 1),
            parameter_bytes=self.parameter_bytes,
            activation_bytes=self.kept_bytes / num_samples,
            output_bytes=self.output_bytes / num_samples,
            may_begin=self.may_begin,
            num_tensor_slices=num_slices if self.is_divided else 1,
            num_all_reduces=num_all_reduces,
            all_reduce_bytes=sum(self.all_reduce_bytes) / num_samples / (num_all_reduces or 1),
            replicated_fraction=1.0 - self.divided_bytes / (self.kept_bytes or 1),
            moment_bytes=self.moment_bytes / num_samples,
            waiting_bytes=self.waiting_bytes / num_samples,
            largest_parameter_bytes=self.largest_parameter_bytes,
        )


class _Tracing:
    """One forward and backward pass of a model."""

    def __init__(self, plan: Mapping[str, str]) -> None:
        self.layers = [_Layer()]
        """In the order of their calls."""
        self._plan = plan
        self._layer = self.layers[0]
        """Where the pass is."""
        self._flops = FlopCounterMode(display=False)
        self._counted_flops = 0
        self._live = LiveBytes()
        self._reached: list[tuple[_Layer, int, int]] = []
        """Each layer that backward came to, the bytes of that gradient, and when."""
        self._counted_parameters: set[nn.Parameter] = set()
        self._kept: dict[int, UntypedStorage] = {}
        """By their ids; alive, or another storage might get the id."""
        self._whole: dict[int, UntypedStorage] = {}
        """Of those: what enters the divided region, in which only part of what is kept stays on a worker."""
        self._is_divided_here = False

    def run(self, model: nn.Module, arguments: tuple[Any, ...]) -> int:
        """Returns the bytes of the model's output."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._kept[id(tensor.untyped_storage())] = tensor.untyped_storage()  # in memory anyway
        with ExitStack() as stack:
            for hook in self._hooks(model):
                stack.callback(hook.remove)
            stack.enter_context(self._live)
            stack.enter_context(self._flops)
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
                output = model(*arguments)
            output_bytes = _num_bytes(output)
            # The gradients of outputs are made within backward, and freed as soon as they have been used.
            totals = [(leaf * 1).sum() for leaf in tensors(output, open_object) if leaf.requires_grad]
            del output
            self._kept.clear()  # would be alive until the end of backward
            self._whole.clear()
            self._count_flops()
            self._live.begin()
            if totals:
                torch.autograd.backward(totals)
            self._count_flops()
        starts = [start for _, _, start in self._reached]
        for (layer, gradient_bytes, _), (before, peak) in zip(self._reached, self._live.peaks(starts), strict=True):
            layer.moment_bytes = max(layer.moment_bytes, peak - before + gradient_bytes)
        return output_bytes

    def _hooks(self, model: nn.Module) -> Iterator[Any]:
        for path, block in (blocks_of(model) or {"model": model}).items():
            yield block.register_forward_pre_hook(partial(self._enter, path))
            yield block.register_forward_hook(self._leave)
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                yield module.register_forward_pre_hook(self._count_parameters)
                yield module.register_forward_hook(self._count_waiting)
            if name in self._plan:
                yield module.register_forward_hook(partial(self._divide, self._plan[name]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(self._forget_gradient)

    def _enter(self, name: str, _module: nn.Module, _arguments: Any) -> None:
        self._count_flops()
        may_begin = all(layer.name != name for layer in self.layers)  # a pipeline cuts before the first call
        if self.layers[0].name:
            self._layer = _Layer()
            self.layers.append(self._layer)
        self._layer.name, self._layer.may_begin = name, may_begin

    def _leave(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        self._layer.output_bytes = _num_bytes(output)
        for tensor in tensors(output, open_object):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reach, self._layer))

    def _reach(self, layer: _Layer, gradient: Tensor) -> None:
        self._count_flops()
        self._layer = layer
        self._reached.append((layer, gradient.nbytes, self._live.num_changes))

    def _count_flops(self) -> None:
        total = self._flops.get_total_flops()
        self._layer.flops += total - self._counted_flops
        self._counted_flops = total

    def _count_parameters(self, module: nn.Module, _arguments: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter not in self._counted_parameters:
                self._counted_parameters.add(parameter)
                self._layer.parameter_bytes += parameter.nbytes
                self._layer.largest_parameter_bytes = max(self._layer.largest_parameter_bytes, parameter.nbytes)

    def _count_waiting(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        # Where a schedule computes the gradients of parameters later, those of the outputs wait for it.
        self._layer.waiting_bytes += _num_bytes(output)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._kept:
            self._kept[id(storage)] = storage
            self._layer.kept_bytes += storage.nbytes()
            if self._is_divided_here and id(storage) not in self._whole:
                self._layer.divided_bytes += storage.nbytes()
        return tensor

    def _divide(self, style: str, _module: nn.Module, arguments: Any, output: Any) -> None:
        """What a tensor group divides and sums behind a module of its plan. A gather is half a sum."""
        layer, sums = self._layer, self._layer.all_reduce_bytes
        (given,) = tensors(arguments, open_object)
        gradient_bytes = given.nbytes * given.requires_grad
        if style.startswith("colwise"):
            sums += [gradient_bytes] * bool(gradient_bytes)
            sums += [output.nbytes / 2] * (style == "colwise_gather_output")
            self._whole[id(given.untyped_storage())] = given.untyped_storage()
        elif "rowwise" in style:
            sums += [output.nbytes] + [gradient_bytes / 2] * (style == "rowwise_split_input" and bool(gradient_bytes))
        layer.is_divided = True
        if style in ("colwise", "rowwise"):
            self._is_divided_here = style == "colwise"

    def _forget_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._live.ignore(parameter.grad)
