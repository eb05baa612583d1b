"""The stages of a cut model as modules, in which everything has the name it has in the whole model."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import ModelError
from paceline.parallel.pipeline.calls import ModelCall
from paceline.parallel.pipeline.message import Outline
from paceline.parallel.pipeline.recording import Layer, Recording, TensorSlot
from paceline.parallel.pipeline.replay import Replay, StageEnd


class Stage(nn.Module):
    """Consecutive layers of a model: takes the values that cross the cut before it, gives those of the cut behind it.

    The last stage gives one value, the model's output. It holds the modules of its layers, the parameters that
    operations between them use, and every buffer that is outside of layers.
    """

    def __init__(self, recording: Recording, start: int, stop: int) -> None:
        super().__init__()
        layers = recording.layers[start:stop]
        self.name = recording.name(start)
        """Name of its first layer."""
        self._recording: Recording | None = recording
        self._model = (recording.model,)  # in a tuple, because it is no part of the stage
        self._opened = recording.opened
        self._is_last = stop == len(recording.layers)
        self._flows = {True: recording.trained, False: recording.evaluated}
        self._runs = {True: (start, stop), False: _in_evaluation(recording, start, stop)}
        modules = [layer.name for layer in layers if layer.function is None]
        self._lent = list(dict.fromkeys(name for layer in layers for name in layer.parameters))
        self._lent += _open_buffers(recording)
        # In the same order in every process: other workers have the same stage, and sum its gradients by position.
        for name in sorted(dict.fromkeys([*modules, *self._lent]), key=lambda name: name.count(".")):
            self._attach(name)

    def _attach(self, name: str) -> None:
        """Hold a module, parameter or buffer of the model under its name."""
        *path, last = name.split(".")
        owner: nn.Module = self
        (original,) = self._model
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

    def forget_example(self) -> None:
        """Free what the layers computed for the example; before that `as_fx_graph` can be called."""
        self._recording = None

    def as_fx_graph(self) -> fx.Graph:
        """The stage's layers, in which tensor parallelism finds some that follow each other."""
        assert self._recording is not None
        return _graph(self._recording, *self._runs[True])

    def forward(self, call: ModelCall, *arriving: Any) -> tuple[Any, ...]:
        """
        Args:
            call: what the model is called with.
            arriving: for all but the first stage an `Outline`, and the tensors that cross the cut before it.
        """
        (model,), run = self._model, self._runs[self.training]
        outline, tensors = (arriving[0], arriving[1:]) if arriving else (Outline([]), ())
        flow = self._flows[self.training]
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        lent = [one for name in self._lent if isinstance(one := operator.attrgetter(name)(self), nn.Parameter)]
        replay = Replay(model, self._opened, flow, run, outline, tensors, device, lent)
        for module in self._opened:
            module.training = self.training
        with self._outside_of_layers():
            try:
                with replay:
                    output = model(*call.args, **call.kwargs)
            except StageEnd:
                output = None
        return (output,) if self._is_last else (replay.outline, *replay.leaving)

    @contextmanager
    def _outside_of_layers(self) -> Iterator[None]:
        """A context in which the model has this stage's parameters and buffers that lie in no layer, as they are."""
        before = []
        for name in self._lent:
            owner, _, key = name.rpartition(".")
            mine, whole = self.get_submodule(owner), self._model[0].get_submodule(owner)
            kind = "_parameters" if key in mine._parameters else "_buffers"
            before.append((getattr(whole, kind), key, getattr(whole, kind)[key]))
            getattr(whole, kind)[key] = getattr(mine, kind)[key]
        try:
            yield
        finally:
            for tensors, key, tensor in before:
                tensors[key] = tensor


def _in_evaluation(recording: Recording, start: int, stop: int) -> tuple[int, int]:
    """The numbers of the stage's limits among the layers that are called in evaluation."""
    trained, evaluated = recording.trained, recording.evaluated
    first = evaluated.same_place(trained, start)
    behind = len(evaluated.layers) if stop == len(trained.layers) else evaluated.same_place(trained, stop)
    if first is None or behind is None or not first < behind:
        raise ModelError(
            f"{type(recording.model).__name__} does not call its layers in one order in training and in evaluation, so "
            f"no stage can begin with '{recording.name(start)}' and end before "
            f"'{recording.name(min(stop, len(recording.layers) - 1))}': cut it elsewhere (pipeline.cuts)."
        )
    return first, behind


def _open_buffers(recording: Recording) -> list[str]:
    """The buffers outside of layers, which the forward pass may use in every stage."""
    inside = {
        f"{layer.name}.{name}"
        for layer in recording.layers
        if layer.function is None
        for name, _ in recording.model.get_submodule(layer.name).named_buffers(remove_duplicate=False)
    }
    return [name for name, _ in recording.model.named_buffers(remove_duplicate=False) if name not in inside]


def stages_of(recording: Recording, starts: Sequence[int]) -> list[Stage]:
    """The stages that begin with these layers; the first one holds what no layer uses, too."""
    stops = [*starts[1:], len(recording.layers)]
    stages = [Stage(recording, start, stop) for start, stop in zip(starts, stops, strict=True)]
    used = {name for stage in stages for name in _tensor_names(stage)}
    for name in _tensor_names(recording.model):
        if name not in used:
            stages[0]._attach(name)
    return stages


def free_other_layers(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Free the parameters of `model` that are in none of this worker's stages: they become scalars, expanded to their
    shapes."""
    own = {module for stage in stages for module in stage.modules()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and module not in own:
                nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(nothing, requires_grad=False)


def _tensor_names(model: nn.Module) -> list[str]:
    """All names of parameters and buffers."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors]


def _graph(recording: Recording, start: int, stop: int) -> fx.Graph:
    """The layers as a graph of torch.fx: modules and operations, and what else they are given."""
    graph = fx.Graph()
    nodes = {slot: graph.placeholder(f"arriving_{slot}") for slot in recording.trained.crossing(start)}
    parameters = {parameter: name for name, parameter in recording.model.named_parameters()}

    def node_of(leaf: Any) -> Any:
        if isinstance(leaf, TensorSlot):
            return nodes[leaf.number]
        if isinstance(leaf, nn.Parameter) and leaf in parameters:
            return graph.get_attr(parameters[leaf])
        if isinstance(leaf, Tensor):
            return graph.placeholder("given")
        return leaf if isinstance(leaf, bool | int | float | str | None) else None

    for number in range(start, stop):
        layer, given = recording.layers[number], recording.arguments[number]
        args, kwargs = pytree.tree_map(node_of, given)
        node = graph.create_node(*_called(layer), tuple(args), dict(kwargs))
        outputs = recording.outputs[number]
        is_one = len(outputs) == 1 and isinstance(outputs[0], TensorSlot)
        for place, slot in enumerate(layer.gives):
            nodes[slot] = node if is_one else graph.call_function(operator.getitem, (node, place))
        nodes |= dict.fromkeys(layer.changes, node)
    flow = recording.trained
    leaving = flow.output if stop == len(flow.layers) else flow.crossing(stop)
    graph.output(tuple(nodes[slot] for slot in leaving if slot in nodes))
    return graph


def _called(layer: Layer) -> tuple[str, Any]:
    """Kind and target of the node."""
    if layer.function is None:
        return "call_module", layer.name
    name = getattr(layer.function, "__name__", "")
    if name in ("add", "mul", "sub", "__getitem__") and getattr(Tensor, name) == layer.function:
        return "call_function", getattr(operator, name.strip("_"))
    is_method = getattr(Tensor, name, None) == layer.function
    return ("call_method", name) if is_method else ("call_function", layer.function)


class _NotHereError(ModelError, AttributeError):
    """The whole model has this attribute, its stages do not; an `AttributeError`, so that `hasattr` is False."""


def _not_here(used: str) -> str:
    return (
        f"The script uses {used}, and a worker of a pipeline has some layers of the model only; reach into it before "
        "run.prepare, take run.whole_state() for its weights, or choose another strategy."
    )


class Stages(nn.Module):
    """The stages of one worker as one module, with the names of the whole model.

    Called, it is the whole model, for evaluation: a collective of all workers of the pipeline, each of which gets the
    output.
    """

    def __init__(self, stages: Sequence[Stage], whole: Any, attributes: Container[str]) -> None:
        """
        Args:
            whole: computes the whole model.
            attributes: names of attributes of the whole model that stages lack.
        """
        super().__init__()
        self._own_stages = nn.ModuleList(stages)
        self._whole = whole
        self._attributes = attributes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole(*args, **kwargs)

    def __getitem__(self, index: Any) -> NoReturn:
        raise ModelError(_not_here(f"model[{index!r}]"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in vars(self).get("_attributes", ()):
                raise _NotHereError(_not_here(f"model.{name}")) from None
            raise

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self._own_stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        for stage in self._own_stages:
            destination = stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """`nn.Module.load_state_dict` of the whole model's state, of which the stage takes its own part."""
        own = set(self.state_dict())
        missing = sorted(own - state_dict.keys())
        unexpected = sorted(state_dict.keys() - own)
        if strict and (missing or unexpected):
            raise RuntimeError(f"this worker's stages miss {missing} in the state, and have no {unexpected}")
        for stage in self._own_stages:
            stage.load_state_dict(state_dict, strict=False, assign=assign)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)
