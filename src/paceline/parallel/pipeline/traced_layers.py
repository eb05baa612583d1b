"""A model as a sequence of layers, traced with torch.fx, that can be cut into stages between any two of them.

Blocks stay whole. Skip connections over a cut are values that travel on; a parameter, or a module without state of its
own, may be used on both sides of a cut. What must stay together is what changes in place, and calls of a module that
has buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import JobError, ModelError, PacelineError
from paceline.parallel.pipeline.tracer import GraphTracer, Mode

# What a question about sizes is answered with: nothing is lost where nobody uses it.
_ANSWERS = (bool, int, float, torch.Size, torch.device, torch.dtype)
# What no message can carry from one stage to the next.
_NOT_SENT = (torch.finfo, torch.iinfo)
_SAME = 1e-3
"""Two runs of the same operations differ by less, relative to the largest number."""


@dataclass(frozen=True)
class TracedLayers:
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
    in_evaluation: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    """Positional and named arguments of layers that are called with others in evaluation."""
    modes: dict[fx.Node, Mode] = field(default_factory=dict)
    """How to compute the layers that the forward pass computes without gradients, or with an autocast of its own."""

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
            together += [place[one] for one in node.all_input_nodes if isinstance(self.values.get(one), _NOT_SENT)]
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


def trace(model: nn.Module, example: Sequence[Any] | None) -> TracedLayers:
    """The layers of `model`.

    Args:
        example: the arguments of a call of the model for a few samples. Where its forward pass decides something by
            the sizes of its inputs, it decides as for these. None: such models cannot be traced.

    Raises:
        ModelError: the forward pass decides by the values of tensors or by the number of samples, does something else
            that hides from tracing, or does other things in training than in evaluation.
    """
    training = {module: module.training for module in model.modules()}
    try:
        evaluated = _trace(model.eval(), example)
        if example is not None and not _is_on_paper(model):
            _check_output(evaluated, example)
        trained = _trace(model.train(), example)
    finally:
        for module, was_training in training.items():
            module.training = was_training
    return dataclasses.replace(trained, in_evaluation=_in_evaluation(trained, evaluated))


def _trace(model: nn.Module, example: Sequence[Any] | None) -> TracedLayers:
    problem: Exception | None = None
    # First as deep as repeated blocks lie; torch's own modules may decide too much by themselves for that.
    for opens_own in (True, False):
        tracer = GraphTracer(model, example, opens_own)
        try:
            with untouched(model):
                graph = tracer.trace(model, tracer.fixed_arguments)
            if tracer.took_numbers and example is not None:
                _check_numbers(model, example, graph, opens_own)
        except PacelineError:
            raise
        except Exception as error:
            problem = problem or error
            continue
        return _traced_layers(model, graph, tracer)
    raise _uncut(model, str(problem).strip().split("\n")[0]) from problem


def _check_numbers(model: nn.Module, example: Sequence[Any], graph: fx.Graph, opens_own: bool) -> None:
    """Numbers that the graph has taken from the example's sizes have to be the same for twice as many samples."""
    twice = pytree.tree_map_only(Tensor, lambda one: torch.cat([one, one]) if one.dim() else one, tuple(example))
    tracer = GraphTracer(model, twice, opens_own)
    with untouched(model):
        again = tracer.trace(model, tracer.fixed_arguments)
    if str(again) != str(graph):
        raise fx.proxy.TraceError("it makes a Python number of the number of samples, by len, int or range")


def _check_output(traced: TracedLayers, example: Sequence[Any]) -> None:
    """Raises where the trace computes something else than the model, as where forward asks isinstance of a value."""
    (output,) = traced.graph.output_node().args
    outputs = pytree.tree_leaves(fx.node.map_arg(output, traced.values.__getitem__))
    with untouched(traced.model), torch.no_grad():
        computed = pytree.tree_leaves(traced.model(*example))
    if len(outputs) != len(computed) or not all(map(_is_same, outputs, computed)):
        raise _uncut(traced.model, "what torch.fx sees of it computes something else, as where it asks isinstance")


def _is_on_paper(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _is_same(traced: Any, computed: Any) -> bool:
    if not isinstance(traced, Tensor) or not isinstance(computed, Tensor):
        return isinstance(traced, Tensor) == isinstance(computed, Tensor)
    if traced.shape != computed.shape or traced.dtype != computed.dtype:
        return False
    scale = computed.abs().max() if computed.numel() and not computed.dtype.is_complex else 1
    return torch.allclose(traced, computed, rtol=_SAME, atol=_SAME * float(scale), equal_nan=True)


def _in_evaluation(trained: TracedLayers, evaluated: TracedLayers) -> dict[fx.Node, tuple[Any, Any]]:
    """The arguments in evaluation of layers that are called with others in training, as F.dropout is."""
    here, there = list(trained.graph.nodes), list(evaluated.graph.nodes)

    def steps(traced: TracedLayers) -> list[tuple[str, str, Mode | None]]:
        return [(node.op, _name(node.target), traced.modes.get(node)) for node in traced.graph.nodes]

    if steps(trained) != steps(evaluated):
        raise _uncut(
            trained.model,
            "it does not do the same in training and in evaluation; leave the difference to modules such as nn.Dropout",
        )
    twins = dict(zip(there, here, strict=True))
    differing = {}
    for node, other in zip(here, there, strict=True):
        args, kwargs = fx.node.map_arg((other.args, other.kwargs), twins.__getitem__)
        if str((args, kwargs)) != str((node.args, node.kwargs)):
            differing[node] = args, kwargs
    return differing


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _uncut(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"The forward pass of {type(model).__name__} cannot be cut into stages ({reason}); build the model as an "
        "nn.Sequential of its blocks, move what decides by values into one of them, or choose another strategy."
    )


def _traced_layers(model: nn.Module, graph: fx.Graph, tracer: GraphTracer) -> TracedLayers:
    for node in list(graph.nodes):  # a call with other arguments is refused before it gets here
        if node.target is fx._symbolic_trace._assert_is_none:
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: not isinstance(tracer.values.get(node), _ANSWERS))
    layers = tuple(node for node in graph.nodes if node.op.startswith("call_"))
    draws = None if tracer.draws is None else tuple(node in tracer.draws for node in layers)
    modes = {node: mode for node, mode in tracer.modes.items() if node in layers}
    return TracedLayers(model, graph, layers, tracer.values, draws, tracer.fixed_arguments or {}, modes=modes)


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
    name for name in vars(operator) if name[0] == "i" and {name[1:], f"{name[1:]}_"} & vars(operator).keys()
}
"""iadd, imul …"""


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
