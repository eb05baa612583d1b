"""A torch.fx tracer that computes every operation on an example while it records it.

So questions about sizes have answers: which way a branch goes, how often a loop runs, what a number is. What was
answered is fixed in the graph; `traced_layers` checks that it does not depend on the number of samples.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.parallel.pipeline.calls import generator_state

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Functions that make a tensor from numbers: torch.fx looks into none of them by itself, and a constant is none that a
# stage would have, nor a random tensor always the same one.
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_QUESTIONS = ("finfo", "iinfo")
"""Functions of a tensor's dtype, which is another one under autocast."""


Autocast = tuple[str, torch.dtype, bool]
"""Kind of device, dtype, and whether it is on."""


@dataclass(frozen=True)
class Mode:
    """How the forward pass says that some layers are to be computed."""

    has_gradients: bool
    autocast: Autocast | None
    """None: as is usual around the model."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        autocast = nullcontext() if self.autocast is None else torch.autocast(*self.autocast)
        with torch.set_grad_enabled(self.has_gradients and torch.is_grad_enabled()), autocast:
            yield


class GraphTracer(fx.Tracer):
    """One trace of one model."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, example: Sequence[Any] | None, opens_own: bool) -> None:
        """
        Args:
            example: the arguments of a call of the model; None: no question is answered.
            opens_own: whether repeated blocks are looked for in torch's own modules, too.
        """
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        """What each node returned for the example."""
        self.draws: set[fx.Node] | None = None
        """Which of them drew random numbers; None: nobody knows."""
        self.fixed_arguments: dict[str, Any] | None = None
        """Arguments that the example left at their defaults."""
        self.modes: dict[fx.Node, Mode] = {}
        """The modes of nodes that are not computed in the mode around the model."""
        self.took_numbers = False
        """Whether a number of the example has become a number of the graph."""
        self._arguments: dict[str, Any] | None = None
        self._opens_own = opens_own
        self._is_computing = False
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._around = self._autocast()
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
        if self._device.type == "meta":
            self._arguments = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), self._arguments)
        else:
            self.draws = set()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with torch.enable_grad(), self._recording():
            return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, _module_qualified_name: str) -> bool:
        if isinstance(m, CONTAINERS):
            return False
        is_own = type(m).__module__.startswith("torch.nn")
        return (is_own and not self._opens_own) or not _has_repeated_blocks(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *more, **options)
        autocast = self._autocast()
        if autocast != self._around or not torch.is_grad_enabled():
            self.modes[node] = Mode(torch.is_grad_enabled(), autocast if autocast != self._around else None)
        if self._arguments is not None and not self._is_computing and kind != "output":
            self._is_computing = True
            try:
                with torch.no_grad():
                    self._compute(node)
            finally:
                self._is_computing = False
        return node

    def _autocast(self) -> Autocast:
        kind = "cpu" if self._device.type == "meta" else self._device.type
        return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def _compute(self, node: fx.Node) -> None:
        assert self._arguments is not None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda before: self.values[before])
        target: Any = node.target
        before = None if self.draws is None else generator_state(self._device)
        if node.op == "placeholder":
            value = self._arguments[argument_of(node, self._arguments)]
        elif node.op == "get_attr":
            value = operator.attrgetter(target)(self.root)
        else:
            value = call_node(self.root, node, args, kwargs)
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

    def number(self, node: fx.Node) -> Any:
        """The number that a node stands for, which is fixed from now on."""
        value = self.values.get(node)
        if not isinstance(value, bool | int | float):
            _refuse("it makes a number of a tensor's values" if isinstance(value, Tensor) else "it takes a number")
        self.took_numbers = True
        return value

    def length(self, node: fx.Node) -> int:
        """The length of a tensor or a sequence; fixed from now on, too."""
        value = self.values.get(node)
        if value is None:
            _refuse("it asks for a length")
        self.took_numbers = True
        return len(value)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Inside, what torch.fx looks through or cannot see becomes a call of its own."""
        originals = {name: getattr(torch, name) for name in (*_FACTORIES, *_QUESTIONS)}
        apply: Any = torch.autograd.Function.__dict__["apply"]

        def record_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            # Its backward is not that of what its forward calls.
            return self._recorded(_named(functools.partial(apply.__func__, cls), cls), args, kwargs)

        for name, original in originals.items():
            setattr(torch, name, self._recorder(original, always=name in _FACTORIES))
        torch.autograd.Function.apply = classmethod(record_apply)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for name, original in originals.items():
                setattr(torch, name, original)

    def _recorder(self, original: Callable[..., Any], always: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def record(*args: Any, **kwargs: Any) -> Any:
            return self._recorded(original, args, kwargs, always)

        return record

    def _recorded(self, function: Callable[..., Any], args: Any, kwargs: Any, always: bool = False) -> Any:
        """A call that is written down if it is of a value of the trace, or always; else simply made."""
        is_traced = always or any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs)))
        if self._is_computing or not is_traced:
            return function(*args, **kwargs)
        return self.create_proxy("call_function", function, args, kwargs)


def _named(function: Callable[..., Any], like: type) -> Callable[..., Any]:
    """With the name that torch.fx asks for."""

    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    named.__name__ = named.__qualname__ = like.__name__
    return named


class _Value(fx.Proxy):
    """A value of the trace that can be asked for a number, where Python itself needs one."""

    tracer: GraphTracer

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return _Attribute(self, k)

    def __len__(self) -> int:
        return self.tracer.length(self.node)

    def __index__(self) -> int:
        return operator.index(self.tracer.number(self.node))

    def __int__(self) -> int:
        return int(self.tracer.number(self.node))

    def __float__(self) -> float:
        return float(self.tracer.number(self.node))


class _Attribute(fx.proxy.Attribute, _Value):
    """What was asked of a value with a dot."""


def call_node(model: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a layer of the graph computes of these arguments."""
    target: Any = node.target
    if node.op == "call_module":
        return model.get_submodule(target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def argument_of(placeholder: fx.Node, names: Collection[str]) -> str:
    """The argument of the model's forward that a placeholder stands for."""
    name = str(placeholder.target).lstrip("*")
    # torch.fx numbers those whose value it has fixed.
    return name if name in names else name.rpartition("_")[0]


def _refuse(what: str) -> NoReturn:
    raise fx.proxy.TraceError(what)


def _is_left_out(parameter: inspect.Parameter, given: Collection[str]) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.name not in given and not is_variadic


def _has_repeated_blocks(module: nn.Module) -> bool:
    """Whether somewhere in it several modules of one composite kind follow each other, as the layers of a net do."""
    for part in module.modules():
        if isinstance(part, CONTAINERS):
            kinds = [
                type(child) for child in part.children() if not isinstance(child, CONTAINERS) and any(child.children())
            ]
            if len(kinds) > len(set(kinds)):
                return True
    return False
