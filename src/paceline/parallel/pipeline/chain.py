"""A model as a chain of layers that can be cut anywhere: traced with torch.fx, its blocks left whole.

Skip connections over a cut are values that travel on; a parameter or a module without state of its own may be used on
both sides of a cut. What must not be cut apart is what changes in place, and calls of one module that has buffers.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import JobError, ModelError, PacelineError
from paceline.parallel.pipeline.calls import generator_state

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What a question about sizes is answered with: nothing is lost where nobody uses it.
_ANSWERS = (bool, int, float, torch.Size, torch.device, torch.dtype)
# Functions that make a tensor from numbers: torch.fx looks into none of them by itself.
_FACTORIES = (torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor)


@dataclass(frozen=True)
class Chain:
    """The layers of a traced model in the order in which they are computed."""

    model: nn.Module
    graph: fx.Graph
    layers: tuple[fx.Node, ...]
    """Calls of modules and functions; not the model's arguments and parameters, which every stage has."""
    values: dict[fx.Node, Any]
    """What each layer returned for the example; empty without one."""
    draws: tuple[bool, ...] | None
    """Which layers drew random numbers in training; None where nobody knows."""
    fixed: dict[str, Any]
    """Arguments of the model that the example left at their defaults: they have to stay so."""

    def name(self, layer: int) -> str:
        """A module's name in the model, or what torch.fx calls an operation: "blocks.0", "add_1"."""
        node = self.layers[layer]
        return str(node.target) if node.op == "call_module" else node.name

    def crossing(self, start: int) -> list[fx.Node]:
        """The layers before `start` whose values are used at or after it, in their order."""
        place = {node: number for number, node in enumerate(self.layers)}
        # What the model returns is needed behind the last layer.
        return [
            node
            for node in self.layers[:start]
            if any(place.get(user, len(self.layers)) >= start for user in node.users)
        ]

    def may_begin(self) -> list[bool]:
        """For every layer whether a stage may begin with it."""
        place = {node: number for number, node in enumerate(self.layers)}
        allowed = [True] * len(self.layers)
        first_call: dict[nn.Module, int] = {}
        for number, node in enumerate(self.layers):
            together = [place[changed] for changed in _changed_in_place(self.model, node) if changed in place]
            if node.op == "call_module":
                module = self.model.get_submodule(str(node.target))
                if next(module.buffers(), None) is not None:
                    together.append(first_call.setdefault(module, number))
            for earlier in together:
                allowed[earlier + 1 : number + 1] = [False] * (number - earlier)
        return allowed

    def starts(self, names: Sequence[str], num_stages: int) -> tuple[int, ...]:
        """The first layer of every stage, of which all but the first begin with the named modules.

        Raises:
            JobError: a name that no layer has, too few or too many, in another order than they are computed in, or a
                stage cannot begin there.
        """
        if len(names) != num_stages - 1:
            raise JobError(
                f"pipeline.cuts names {len(names)} modules; {num_stages} stages need {num_stages - 1}, the first "
                "module of every stage but the first."
            )
        known = [self.name(number) for number in range(len(self.layers))]
        starts = [0]
        for name in names:
            start = next((n for n, layer in enumerate(known) if layer == name or layer.startswith(f"{name}.")), None)
            if start is None:
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = " or ".join(f"'{layer}'" for layer in near) or f"for example '{known[len(known) // 2]}'"
                raise JobError(f"pipeline.cuts names '{name}', which this model has not: did you mean {hint}?")
            if start <= starts[-1]:
                raise JobError(
                    f"pipeline.cuts names '{name}' where a stage before it has begun already; name the modules in the "
                    "order in which they are computed, and not the model's first one."
                )
            if not self.may_begin()[start]:
                raise JobError(
                    f"No stage can begin with '{name}': it changes in place what was computed before it, or stands "
                    "between two calls of the same module; choose another place in pipeline.cuts."
                )
            starts.append(start)
        return tuple(starts)


def trace(model: nn.Module, example: Sequence[Any] | None) -> Chain:
    """The layers of `model`.

    Args:
        example: the arguments of a call of the model for a few samples. Where its forward pass decides something by
            the sizes of its inputs, it decides as for these. None: such models cannot be traced.

    Raises:
        ModelError: the forward pass decides by the values of tensors, or does something else that hides from tracing.
    """
    training = {module: module.training for module in model.modules()}
    try:
        with untouched(model), torch.no_grad():
            evaluated = _trace(model.eval(), example)
            trained = _trace(model.train(), example)
    finally:
        for module, was_training in training.items():
            module.training = was_training
    if str(evaluated.graph) != str(trained.graph):
        raise ModelError(
            f"The forward pass of {type(model).__name__} cannot be cut into stages: it does not do the same in "
            "training and in evaluation; leave the difference to modules such as nn.Dropout."
        )
    return trained


def _trace(model: nn.Module, example: Sequence[Any] | None) -> Chain:
    problem: Exception | None = None
    # First as deep as repeated blocks lie; torch's own modules may decide too much by themselves for that.
    for opens_own in (True, False):
        tracer = _Tracer(model, example, opens_own)
        try:
            graph = tracer.trace(model, tracer.fixed_arguments)
        except PacelineError:
            raise
        except Exception as error:
            problem = problem or error
            continue
        return _chain(model, graph, tracer)
    reason = str(problem).strip().split("\n")[0]
    raise ModelError(
        f"The forward pass of {type(model).__name__} cannot be cut into stages ({reason}); build the model as an "
        "nn.Sequential of its blocks, move what decides by values into one of them, or choose another strategy."
    ) from problem


def _chain(model: nn.Module, graph: fx.Graph, tracer: _Tracer) -> Chain:
    for node in list(graph.nodes):  # a call with other arguments is refused before it gets here
        if node.target is fx._symbolic_trace._assert_is_none:
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: not isinstance(tracer.values.get(node), _ANSWERS))
    layers = tuple(node for node in graph.nodes if node.op.startswith("call_"))
    draws = None if tracer.draws is None else tuple(node in tracer.draws for node in layers)
    return Chain(model, graph, layers, tracer.values, draws, tracer.fixed_arguments or {})


class _Tracer(fx.Tracer):
    """Runs the model on the example while it writes down what it does, so that questions about sizes have answers."""

    def __init__(self, model: nn.Module, example: Sequence[Any] | None, opens_own: bool) -> None:
        super().__init__(autowrap_functions=_FACTORIES)
        self.values: dict[fx.Node, Any] = {}
        self.draws: set[fx.Node] | None = None
        self.fixed_arguments: dict[str, Any] | None = None
        self._arguments: dict[str, Any] | None = None
        self._opens_own = opens_own
        self._is_computing = False
        if example is None:
            return
        signature = inspect.signature(model.forward)
        bound = signature.bind(*example)
        left_out = [
            name for name, parameter in signature.parameters.items() if _is_left_out(parameter, bound.arguments)
        ]
        bound.apply_defaults()
        self._arguments = dict(bound.arguments)
        self.fixed_arguments = {name: bound.arguments[name] for name in left_out} or None
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if self._device.type == "meta":
            self._arguments = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), self._arguments)
        else:
            self.draws = set()

    def is_leaf_module(self, m: nn.Module, _module_qualified_name: str) -> bool:
        if isinstance(m, _CONTAINERS):
            return False
        is_own = type(m).__module__.startswith("torch.nn")
        return (is_own and not self._opens_own) or not _has_repeated_blocks(m)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
        if self._arguments is not None and not self._is_computing and kind != "output":
            self._is_computing = True
            try:
                self._compute(proxy.node)
            finally:
                self._is_computing = False
        return proxy

    def _compute(self, node: fx.Node) -> None:
        assert self._arguments is not None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda before: self.values[before])
        target: Any = node.target
        before = None if self.draws is None else generator_state(self._device)
        if node.op == "placeholder":
            value = self._arguments[argument_of(node, self._arguments)]
        elif node.op == "get_attr":
            value = operator.attrgetter(target)(self.root)
        elif node.op == "call_module":
            value = self.root.get_submodule(target)(*args, **kwargs)
        elif node.op == "call_method":
            value = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            value = target(*args, **kwargs)
        self.values[node] = value
        if self.draws is not None and before is not None and not torch.equal(before, generator_state(self._device)):
            self.draws.add(node)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._is_computing else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._is_computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.proxy.Proxy) -> bool:
        value = self.values.get(obj.node)
        # The value of a tensor is another one for every batch.
        return super().to_bool(obj) if value is None or isinstance(value, Tensor) else bool(value)

    def iter(self, obj: fx.proxy.Proxy) -> Iterator[Any]:
        value, whole = self.values.get(obj.node), cast(Any, obj)
        if isinstance(value, tuple | list):
            return iter([whole[place] for place in range(len(value))])
        return super().iter(obj)


def argument_of(placeholder: fx.Node, names: Collection[str]) -> str:
    """The argument of the model's forward that a placeholder stands for."""
    name = str(placeholder.target).lstrip("*")
    # torch.fx numbers those whose value it has fixed.
    return name if name in names else name.rpartition("_")[0]


def _is_left_out(parameter: inspect.Parameter, given: Collection[str]) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.name not in given and not is_variadic


def _has_repeated_blocks(module: nn.Module) -> bool:
    """Whether somewhere in it several modules of one composite kind follow each other, as the layers of a net do."""
    for part in module.modules():
        if isinstance(part, _CONTAINERS):
            kinds = [
                type(child) for child in part.children() if not isinstance(child, _CONTAINERS) and any(child.children())
            ]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def _changed_in_place(model: nn.Module, node: fx.Node) -> Iterator[fx.Node]:
    """The layers whose values `node` overwrites."""
    if node.op == "call_module":
        is_in_place = getattr(model.get_submodule(str(node.target)), "inplace", False)
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_in_place = (
            (name.endswith("_") and not name.endswith("__"))
            or (node.op == "call_function" and name in _IN_PLACE_OPERATORS)
            or node.target is operator.setitem
            or bool(node.kwargs.get("inplace", False))
        )
    if is_in_place and node.args and isinstance(node.args[0], fx.Node):
        yield node.args[0]


_IN_PLACE_OPERATORS = {
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "imatmul",
}


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and generators are afterwards as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({parameter.device.index for parameter, _ in gradients if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
