"""Finds layers of a module that follow each other with nothing between them that needs all features at once.

A module's own forward is traced, its children taken as they are (torch.fx). In a module that cannot be traced, because
its path depends on values, no such layers are found, and each is shared by itself.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from paceline.parallel.buffers import buffers_kept
from paceline.parallel.generators import generator_states

ELEMENTWISE: set[type[nn.Module]] = {
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
}  # fmt: skip
_PER_CHANNEL: set[type[nn.Module]] = ELEMENTWISE | {
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
}  # fmt: skip
_ELEMENTWISE_FUNCTIONS: set[Any] = {
    F.elu, F.gelu, F.hardswish, F.leaky_relu, F.mish, F.relu, F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.tanh,
    torch.relu, torch.sigmoid, torch.tanh,
}  # fmt: skip
_ELEMENTWISE_METHODS = {"relu", "sigmoid", "tanh"}
PRODUCTS_AND_SUMS: set[Any] = {operator.mul, operator.add, torch.mul, torch.add}


@dataclass(frozen=True)
class Pair:
    """Linear layers and the one that takes their features: colwise and rowwise, they need one sum in all."""

    columns: tuple[str, ...]
    rows: str
    dropouts: tuple[str, ...]
    """The dropout layers between `columns` and `rows`."""
    has_one_input: bool
    """Whether all of `columns` take the same tensor."""


@dataclass(frozen=True)
class ConvolutionRun:
    """A convolution and the layers behind it that treat every channel by itself."""

    conv: str
    last: str
    """The last of them, or the convolution."""
    next_conv: str | None
    """A convolution that takes nothing but the last one's output."""


class _OwnForward(fx.Tracer):
    """Steps into no other module than the one it is given."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return True


def trace(module: nn.Module, *, only_input: bool = False) -> fx.Graph | None:
    """The graph of the module's own forward; None if it cannot be traced, or is another one in evaluation.

    A forward that draws random numbers without its input (layers skipped at random) might be another one each time.
    A module that was made from a graph gives that itself, by its method `as_fx_graph`.

    Args:
        only_input: as it is with what has a default left at that.
    """
    if callable(as_fx_graph := getattr(module, "as_fx_graph", None)):
        return cast(fx.Graph, as_fx_graph())
    generators = generator_states(torch.device("cpu"))
    graphs = []
    # A forward may move buffers, and set attributes, also for a proxy.
    attributes = dict(vars(module))
    with buffers_kept(module), suppress(Exception):  # whatever a proxy cannot do
        for training in (True, False):
            module.training = training
            graphs.append(_OwnForward().trace(module, _defaults(module) if only_input else None))
    vars(module).clear()
    vars(module).update(attributes)
    if len(graphs) < 2:
        return None
    is_always_so = str(graphs[0]) == str(graphs[1]) and generators == generator_states(torch.device("cpu"))
    return graphs[0] if is_always_so else None


def _defaults(module: nn.Module) -> dict[str, Any] | None:
    parameters = inspect.signature(module.forward).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty} or None


class TracedForwards:
    """The forward of every module of one model. Names are those of `model.named_modules()`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        self.occurs_once = {module for module, found in names.items() if len(found) == 1}
        self.holders = _holders(model)
        """The modules that hold each parameter themselves."""
        graph = trace(model) if hasattr(model, "as_fx_graph") else None
        called = [] if graph is None else [str(node.target) for node in graph.nodes if node.op == "call_module"]
        self._shells = {name for name in self._modules if name and any(one.startswith(f"{name}.") for one in called)}

    def pairs_and_runs(self, name: str) -> tuple[list[Pair], list[ConvolutionRun]]:
        """Pairs of linear layers, and runs from convolutions, in the forward of the module `name`."""
        module = self._modules[name]
        if name in self._shells:  # it lists what the model calls one by one
            return [], []
        has_layers = any(isinstance(child, nn.Linear | _ConvNd) for child in module.modules() if child is not module)
        graph = trace(module) if has_layers and next(module.children(), None) is not None else None
        if graph is None:
            return [], []
        prefix = f"{name}." if name else ""
        reader = _Reader(graph, lambda target: self._modules.get(prefix + target), self.occurs_once)
        return list(reader.pairs(prefix)), list(reader.runs(prefix))


class _Reader:
    """One traced forward."""

    def __init__(self, graph: fx.Graph, child: Callable[[str], nn.Module | None], occurs_once: set[nn.Module]) -> None:
        self._graph = graph
        self._child = child
        self._occurs_once = occurs_once
        self._num_calls: dict[str, int] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                self._num_calls[str(node.target)] = self._num_calls.get(str(node.target), 0) + 1

    def _layer(self, node: fx.Node) -> nn.Module | None:
        """The child that the node calls with one tensor, if that is the only call of it anywhere."""
        if node.op != "call_module" or node.kwargs or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
            return None
        module = self._child(str(node.target))
        is_only = module in self._occurs_once and self._num_calls[str(node.target)] == 1
        return module if is_only else None

    def pairs(self, prefix: str) -> Iterator[Pair]:
        taken: set[fx.Node] = set()
        for node in self._graph.nodes:
            rows = self._layer(node)
            if type(rows) is not nn.Linear or node in taken:
                continue
            visited: set[fx.Node] = set()
            columns: list[fx.Node] = []
            if not self._is_divided(node.args[0], rows.in_features, columns, visited) or taken & set(columns):
                continue
            if any(user is not node and user not in visited for inner in visited for user in inner.users):
                continue
            taken |= {node, *columns}
            dropouts = [str(inner.target) for inner in visited if type(self._layer(inner)) is nn.Dropout]
            yield Pair(
                tuple(prefix + str(column.target) for column in columns),
                prefix + str(node.target),
                tuple(prefix + name for name in sorted(dropouts)),
                len({column.args[0] for column in columns}) == 1,
            )

    def _is_divided(self, node: Any, width: int, columns: list[fx.Node], visited: set[fx.Node]) -> bool:
        """Whether the node's every feature comes from the same feature of linear layers, which go to `columns`."""
        if not isinstance(node, fx.Node):
            return False
        if node in visited:
            return True
        visited.add(node)
        layer = self._layer(node)
        if type(layer) is nn.Linear and layer.out_features == width:
            columns.append(node)
            return True
        if is_elementwise(node, layer) or type(layer) is nn.Dropout:
            return self._is_divided(node.args[0], width, columns, visited)
        if node.op == "call_function" and node.target in PRODUCTS_AND_SUMS and not node.kwargs:
            return len(node.args) == 2 and all(self._is_divided(arg, width, columns, visited) for arg in node.args)
        return False

    def runs(self, prefix: str) -> Iterator[ConvolutionRun]:
        for node in self._graph.nodes:
            if not isinstance(self._layer(node), _ConvNd):
                continue
            last = current = node
            next_conv = None
            while len(current.users) == 1:
                (current,) = current.users
                layer = self._layer(current)
                if type(layer) in _PER_CHANNEL and not getattr(layer, "return_indices", False):
                    last = current
                elif isinstance(layer, _ConvNd):
                    next_conv = prefix + str(current.target)
                    break
                elif not is_elementwise(current, layer):
                    break
            yield ConvolutionRun(prefix + str(node.target), prefix + str(last.target), next_conv)


def _holders(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(name)
    return holders


def is_elementwise(node: fx.Node, layer: nn.Module | None) -> bool:
    """Whether the node does the same to every value of its first argument, and has no other tensor."""
    if sum(isinstance(arg, fx.Node) for arg in (*node.args, *node.kwargs.values())) != 1:
        return False
    return (
        type(layer) in ELEMENTWISE
        or (node.op == "call_function" and node.target in _ELEMENTWISE_FUNCTIONS)
        or (node.op == "call_method" and node.target in _ELEMENTWISE_METHODS)
    )
