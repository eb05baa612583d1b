"""A model as a sequence of layers, recorded from one call of it, that can be cut into stages between any two of them.

A layer is a call of a module, or an operation between such calls on what they returned. Skip connections over a cut
are values that travel on; a parameter, or a module without state of its own, may be used on both sides of a cut. What
must stay together is what changes in place, calls of a module that has buffers, and what is checkpointed together.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.errors import JobError, ModelError
from paceline.parallel.pipeline.message import Outline, TensorForm


@dataclass(frozen=True)
class TensorSlot:
    """The place of a tensor among all that a model's layers return."""

    number: int


@dataclass(frozen=True)
class Layer:
    """One call in the forward pass. Tensors are numbered by their slots."""

    name: str
    """The module's, or what the operation is called: "blocks.0", "add_1"."""
    function: Any = None
    """None: a module."""
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    """In place."""
    parameters: tuple[str, ...] = ()
    """The names of the parameters that an operation uses."""
    adopts: tuple[int, ...] = ()
    """Places, among the tensors in its arguments, of those that were no layer's and that it writes into."""
    emits: tuple[str, ...] = ()
    """Modules inside of it whose output, too, is used elsewhere, as where a hook collects it."""
    checkpoint: int | None = None
    """The call of torch.utils.checkpoint that it is part of: the backward pass computes all of that again."""

    @property
    def what(self) -> Any:
        """What is equal in two calls of the same layer."""
        return self.name if self.function is None else self.function


@dataclass(frozen=True)
class Flow:
    """The layers of a model in the order in which they are computed, in training or in evaluation."""

    layers: tuple[Layer, ...]
    output: tuple[int, ...]
    """The slots in what the model returns."""
    draws: tuple[bool, ...] | None = None
    """Which layers drew random numbers; None where that is unknown."""
    questions: frozenset[Any] = frozenset()
    """Functions that return no tensor, such as the question for a shape."""
    free: frozenset[str] = frozenset()
    """Modules that compute something from shapes and buffers only, such as rotary embeddings: all stages do so."""

    @property
    def drawing(self) -> frozenset[Any]:
        """Layers that draw random numbers."""
        return frozenset(layer.what for layer, draws in zip(self.layers, self.draws or (), strict=False) if draws)

    def crossing(self, start: int) -> tuple[int, ...]:
        """The slots of tensors that are made before layer `start` and used at or after it, in their order."""
        used = {slot for layer in self.layers[start:] for slot in (*layer.takes, *layer.changes)} | set(self.output)
        made = dict.fromkeys(slot for layer in self.layers[:start] for slot in layer.gives)
        return tuple(slot for slot in made if slot in used)

    def same_place(self, other: Flow, start: int) -> int | None:
        """The number that a layer of another flow has in this one; None where it is none of these."""
        if [layer.what for layer in self.layers] == [layer.what for layer in other.layers]:
            return start
        name = other.layers[start].name
        if start and other.layers[start].function is not None:
            return None
        times = [number for number, layer in enumerate(other.layers) if layer.name == name].index(start)
        here = [number for number, layer in enumerate(self.layers) if layer.name == name]
        return here[times] if start and times < len(here) else 0 if not start else None


@dataclass(frozen=True)
class Recording:
    """The layers of a model, and what they computed for an example."""

    model: nn.Module
    opened: frozenset[nn.Module]
    """The modules that call layers."""
    trained: Flow
    evaluated: Flow
    arguments: tuple[tuple[Any, Any], ...] = ()
    """What each layer of the training pass was called with, with a `TensorSlot` for every layer's tensor."""
    outputs: tuple[Any, ...] = ()
    """What each of them returned, likewise, in a list with what it adopted and what it emitted."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """The tensors; empty without an example."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.trained.layers

    def name(self, layer: int) -> str:
        return self.layers[layer].name

    def may_begin(self) -> list[bool]:
        """For every layer whether a stage may begin with it."""
        allowed = [self.evaluated.same_place(self.trained, number) is not None for number in range(len(self.layers))]
        made: dict[int, int] = {}
        first_call: dict[Any, int] = {}
        for number, layer in enumerate(self.layers):
            for slot in layer.gives:
                made.setdefault(slot, number)
            together = [made[slot] for slot in layer.changes]
            if layer.function is None and next(self.model.get_submodule(layer.name).buffers(), None) is not None:
                together.append(first_call.setdefault(layer.name, number))
            if layer.checkpoint is not None:
                together.append(first_call.setdefault(layer.checkpoint, number))
            for earlier in together:
                allowed[earlier + 1 : number + 1] = [False] * (number - earlier)
        return allowed

    def outline(self, start: int) -> Outline:
        """What the layers before `start` returned for the example, without the values."""
        forms = {slot: TensorForm.of(value) for slot, value in self.values.items()}
        filled = pytree.tree_map_only(TensorSlot, lambda slot: forms[slot.number], list(self.outputs[:start]))
        return Outline(filled)

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
        known = [layer.name for layer in self.layers]
        starts = [0]
        for name in names:
            start = next((n for n, layer in enumerate(known) if layer == name or layer.startswith(f"{name}.")), None)
            if start is None:
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = " or ".join(f"'{layer}'" for layer in near) or f"for example '{known[len(known) // 2]}'"
                raise JobError(f"pipeline.cuts names '{name}', which this model does not have: did you mean {hint}?")
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


def record_sequential(model: nn.Module) -> Recording:
    """The layers of an nn.Sequential, which need no example to be known.

    Raises:
        ModelError: the model is none.
    """
    names: list[str] = []
    opened = {model}

    def add(module: nn.Module, name: str) -> None:
        if type(module) is not nn.Sequential:
            names.append(name)
            return
        opened.add(module)
        for key, child in module.named_children():
            add(child, f"{name}.{key}" if name else key)

    if type(model) is not nn.Sequential:
        raise ModelError(
            f"A pipeline cuts {type(model).__name__} by a call of it: give run.prepare(model, optimizer, example=...), "
            "the inputs of a few samples."
        )
    add(model, "")
    layers = tuple(
        Layer(name, takes=(number - 1,) if number else (), gives=(number,)) for number, name in enumerate(names)
    )
    flow = Flow(layers, output=(len(layers) - 1,))
    return Recording(model, frozenset(opened), flow, flow, outputs=tuple([TensorSlot(n)] for n in range(len(layers))))
