"""Measures the layers of a traced model: time, memory, and what would be sent if a stage ended there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from paceline.parallel.clock import Clock
from paceline.parallel.pipeline.traced_layers import TracedLayers, untouched
from paceline.parallel.pipeline.tracer import call_node
from paceline.spec.model_cost import LayerCost

# A model without values has no times: its layers are compared by their arithmetic, on a device of this speed.
_FLOPS_PER_S = 1e12


def measure_layers(traced: TracedLayers, device: torch.device, num_repeats: int = 3) -> list[LayerCost]:
    """The cost of every layer for the example that the model was traced with.

    Layers run one by one, forward and backward, on the values they had in the trace; the fastest of `num_repeats` runs
    counts, which is the least disturbed. On the meta device times are in proportion to floating-point operations.
    Without an example every layer counts as much as its parameters.
    """
    allowed = traced.may_begin()
    counted: set[int] = set()
    costs = []
    with untouched(traced.model):
        for number, node in enumerate(traced.layers):
            parameters = [p for p in _parameters(traced.model, node) if id(p) not in counted]
            counted.update(map(id, parameters))
            parameter_bytes = sum(p.numel() * p.element_size() for p in parameters)
            time_s, activation_bytes = float(parameter_bytes), 0
            if traced.values:
                time_s, activation_bytes = _time_layer(traced, node, device, num_repeats)
            is_last = number + 1 == len(traced.layers)
            crossing = [] if is_last else traced.crossing(number + 1)
            output_bytes = sum(tensor_bytes(traced.values.get(value)) for value in crossing)
            costs.append(
                LayerCost(traced.name(number), time_s, parameter_bytes, activation_bytes, output_bytes, allowed[number])
            )
    return costs


def _parameters(model: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    found = (_attribute(model, str(before.target)) for before in node.all_input_nodes if before.op == "get_attr")
    return [value for value in found if isinstance(value, nn.Parameter)]


def _attribute(model: nn.Module, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value, however nested."""
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _time_layer(traced: TracedLayers, node: fx.Node, device: torch.device, num_repeats: int) -> tuple[float, int]:
    """Seconds forward and backward, and bytes kept in between."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        copy = value.detach().clone()
        return copy.requires_grad_() * 1 if copy.is_floating_point() or copy.is_complex() else copy

    def inputs() -> tuple[Any, Any]:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda before: traced.values[before])
        # A step away from the leaves, so that a layer may change its inputs in place.
        found: tuple[Any, Any] = pytree.tree_map(fresh, (args, kwargs))
        return found

    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in _parameters(traced.model, node)}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own or tensor.is_meta:
            kept[tensor.data_ptr() or id(tensor)] = tensor.numel() * tensor.element_size()
        return tensor

    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(traced.values[node])):
        args, kwargs = inputs()
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            backward(call_node(traced.model, node, args, kwargs))
        return counter.get_total_flops() / _FLOPS_PER_S, sum(kept.values())
    clock = Clock(device)
    times_s = []
    for repeat in range(1 + num_repeats):  # the first warms up
        args, kwargs = inputs()
        grads = pytree.tree_map_only(Tensor, torch.ones_like, traced.values[node])
        begin = clock.mark()
        if repeat == 0:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                backward(call_node(traced.model, node, args, kwargs), grads)
        else:
            backward(call_node(traced.model, node, args, kwargs), grads)
        times_s.append(clock.seconds(begin, clock.mark()))
    return min(times_s[1:]), sum(kept.values())


def backward(output: Any, grads: Any = None) -> None:
    """Differentiate every tensor of `output`, by `grads` or ones."""
    leaves = pytree.tree_leaves(output)
    weights = pytree.tree_leaves(grads) if grads is not None else [None] * len(leaves)
    roots = [
        (leaf, weight)
        for leaf, weight in zip(leaves, weights, strict=True)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if roots:
        outputs = [leaf for leaf, _ in roots]
        given = [torch.ones_like(leaf) if weight is None else weight for leaf, weight in roots]
        torch.autograd.backward(outputs, given)
