"""The stages of a cut model as modules, in which everything has the name it has in the whole model."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, fx, nn

from paceline.parallel.pipeline.traced_layers import TracedLayers
from paceline.parallel.pipeline.tracer import argument_of, call_node


class Stage(nn.Module):
    """Consecutive layers of a model: takes the values that cross the cut before it, gives those of the cut behind it.

    The last stage gives one value, the model's output.
    """

    def __init__(self, traced: TracedLayers, start: int, stop: int) -> None:
        super().__init__()
        self._arriving = traced.crossing(start)
        self._layers = traced.layers[start:stop]
        self._in_evaluation = traced.in_evaluation
        self._modes = traced.modes
        self._is_last = stop == len(traced.layers)
        self._leaving = [] if self._is_last else traced.crossing(stop)
        output = traced.graph.output_node()
        self._output = output.args[0]
        used = [node for layer in self._layers for node in layer.all_input_nodes]
        if self._is_last:
            used += output.all_input_nodes
        self._arguments = {node: node for node in used if node.op == "placeholder"}
        self._attributes = {node: str(node.target) for node in used if node.op == "get_attr"}
        self._dropped = self._last_uses()
        modules = [str(layer.target) for layer in self._layers if layer.op == "call_module"]
        # In the same order in every process: other workers have the same stage, and sum its gradients by position.
        for name in sorted(dict.fromkeys([*modules, *self._attributes.values()]), key=lambda name: name.count(".")):
            self._attach(traced.model, name)

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """The values that are not needed any more after each layer."""
        needed = set(self._leaving)
        if self._is_last:
            fx.node.map_arg(self._output, lambda node: needed.add(node))
        dropped: dict[fx.Node, list[fx.Node]] = {}
        for layer in reversed(self._layers):
            dropped[layer] = [node for node in layer.all_input_nodes if node not in needed]
            needed.update(dropped[layer])
        return dropped

    def as_fx_graph(self) -> fx.Graph:
        """The graph of the stage's layers, in which tensor parallelism finds layers that follow each other."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in self._arriving}
        for node in (*self._arguments, *self._attributes, *self._layers):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        leaving = self._output if self._is_last else tuple(self._leaving)
        graph.output(fx.node.map_arg(leaving, copies.__getitem__))
        return graph

    def _attach(self, model: nn.Module, name: str) -> None:
        """Hold a module, parameter or buffer of `model` under its name."""
        *path, last = name.split(".")
        owner: nn.Module = self
        original = model
        for part in path:
            original = getattr(original, part)
            if part not in owner._modules:
                kind = type(original)
                # A list of modules stays one: sharding and activation checkpointing look for lists of layers.
                owner.add_module(part, kind() if kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict) else nn.Module())
            owner = getattr(owner, part)
        value = getattr(original, last)
        if isinstance(value, nn.Module):
            owner.add_module(last, value)
        elif isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        elif isinstance(value, Tensor) and last in original._buffers:
            owner.register_buffer(last, value, persistent=last not in original._non_persistent_buffers_set)
        else:
            setattr(owner, last, value)

    def forward(self, arguments: Mapping[str, Any], *arriving: Any) -> tuple[Any, ...]:
        """`arguments`: what the model was called with, by name."""
        values: dict[fx.Node, Any] = dict(zip(self._arriving, arriving, strict=True))
        values |= {node: arguments[argument_of(node, arguments)] for node in self._arguments}
        values |= {node: operator.attrgetter(name)(self) for node, name in self._attributes.items()}
        differing = {} if self.training else self._in_evaluation
        for layer in self._layers:
            called_with = differing.get(layer, (layer.args, layer.kwargs))
            args, kwargs = fx.node.map_arg(called_with, values.__getitem__)
            mode = self._modes.get(layer)
            with nullcontext() if mode is None else mode.applied():
                values[layer] = call_node(self, layer, args, kwargs)
            for node in self._dropped[layer]:
                values.pop(node, None)
        if self._is_last:
            return (fx.node.map_arg(self._output, values.__getitem__),)
        return tuple(values[node] for node in self._leaving)


def stages_of(traced: TracedLayers, starts: Sequence[int]) -> list[Stage]:
    """The stages that begin with these layers; the first one holds what no layer uses, too."""
    stages = [Stage(traced, start, stop) for start, stop in zip(starts, [*starts[1:], len(traced.layers)], strict=True)]
    used = {name for stage in stages for name in _tensor_names(stage)}
    for name in _tensor_names(traced.model):
        if name not in used:
            stages[0]._attach(traced.model, name)
    return stages


def _tensor_names(model: nn.Module) -> list[str]:
    """All names of parameters and buffers."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors]


class Stages(nn.Module):
    """The stages of one worker as one module, with the names of the whole model.

    Called, it is the whole model, for evaluation: a collective of all workers of the pipeline, each of which gets the
    output.
    """

    def __init__(self, stages: Sequence[Stage], whole: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._whole = whole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        for stage in self.stages:
            destination = stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`; every stage takes what is its own."""
        own = set(self.state_dict())
        missing = sorted(own - state_dict.keys())
        unexpected = sorted(state_dict.keys() - own)
        if strict and (missing or unexpected):
            raise RuntimeError(f"this worker's stages miss {missing} in the state, and have no {unexpected}")
        for stage in self.stages:
            stage.load_state_dict(state_dict, strict=False, assign=assign)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)
