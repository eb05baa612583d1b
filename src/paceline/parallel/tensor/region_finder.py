"""Finds the regions of a model for sequence parallelism: where workers may keep their own positions of a sequence.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2: norms, dropout
and sums between a rowwise layer and the next colwise layer treat every position by itself, so a worker needs its own
only. The rowwise layer's sum becomes a reduce-scatter along the positions and the next colwise layer's input an
all-gather of them, and in backward the other way round: what a ring sends for one all-reduce.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import fx, nn

from paceline.parallel.tensor.pairs import ELEMENTWISE, PRODUCTS_AND_SUMS, TracedForwards, is_elementwise, trace
from paceline.parallel.tensor.plan import TensorPlan
from paceline.parallel.tensor.sequence_region import SEQUENCE_LAYERS

_MIN_PAIRS = 2
"""One pair alone would be cut into positions and put together again for nothing."""

_Kind = Literal["other", "positions", "whole", "features"]
"""What a value is on a worker: the same everywhere; its own positions; all of them, to be given to colwise layers; or
what these make of it, up to the rowwise layer."""
_ABOUT_TENSORS = {"shape", "dtype", "device"}
_SUMS = PRODUCTS_AND_SUMS | {operator.sub, torch.sub}

_Added = dict[str, str]
"""What a region adds to the styles of the modules inside."""


def add_sequence_regions(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    """The plan with sequence parallelism wherever layers that it divides allow it, and a note on where they do not."""
    styles = dict(plan.styles)
    for first, last, added in _RegionFinder(model, plan).regions(""):
        for name, style in added.items():
            styles[name] = f"{styles[name]} + {style}" if name in styles else style
        styles[first] = f"enter_sequence_region + {styles[first]}" if first in styles else "enter_sequence_region"
        styles[last] = f"{styles[last]} + leave_sequence_region" if last in styles else "leave_sequence_region"
    plan = replace(plan, styles={name: styles[name] for name, _ in model.named_modules() if name in styles})
    entries = plan.entries.values()
    num_pairs = sum("rowwise" in entry or "attention" in entry for entry in entries)
    num_found = sum("scatter_sequence" in entry for entry in entries)
    if num_found == num_pairs and num_found:
        return plan
    note = (
        f"Sequence parallelism: {num_found} of {num_pairs} pairs of layers follow each other with nothing but norms, "
        "dropout and sums between them; what passes between others stays whole on each worker."
    )
    return replace(plan, notes=(*plan.notes, note))


class _RegionFinder:
    def __init__(self, model: nn.Module, plan: TensorPlan) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._entries = plan.entries
        self._forwards = TracedForwards(model)
        self._known: dict[str, _Added | None] = {}
        self._graphs: dict[str, fx.Graph | None] = {}
        self._taken: set[str] = set()

    def regions(self, name: str) -> Iterator[tuple[str, str, _Added]]:
        """First module, last module and what is added to styles, of every region in the module `name`.

        That is itself, neighbours among the modules it calls, or some inside of these.
        """
        if name in self._taken:
            return
        runs = [[name]] if self._inside(name) is not None else list(self._runs(name))
        for run in runs:
            added = {module: style for one in run for module, style in (self._inside(one) or {}).items()}
            if sum("scatter_sequence" in style for style in added.values()) >= _MIN_PAIRS:
                yield run[0], run[-1], added
            self._taken.update(run)
        for inner in self._called(name) if name not in self._taken else []:
            if self._model.get_submodule(inner) in self._forwards.occurs_once:
                yield from self.regions(inner)

    def _called(self, name: str) -> list[str]:
        """The modules that a module's forward calls; all its children where that is not known."""
        graph = self._graph(name)
        if graph is None:
            return [_join(name, key) for key, _ in self._model.get_submodule(name).named_children()]
        return list(dict.fromkeys(_join(name, str(node.target)) for node in graph.nodes if node.op == "call_module"))

    def _graph(self, name: str) -> fx.Graph | None:
        if name not in self._graphs:
            module = self._modules.get(name)
            has_children = module is not None and next(module.children(), None) is not None
            self._graphs[name] = trace(module) if module is not None and has_children else None
        return self._graphs[name]

    def _runs(self, name: str) -> Iterator[list[str]]:
        """Modules that follow each other, each with nothing but the one before it for its input."""
        module = self._modules.get(name)
        if type(module) is nn.TransformerEncoder:  # whose forward has too many ways to be traced
            inner = [_join(name, f"layers.{number}") for number in range(module.num_layers)]
            inner += [_join(name, "norm")] if module.norm is not None else []
            if all(self._inside(one) is not None for one in inner):
                yield inner
            return
        graph = self._graph(name)
        run: list[fx.Node] = []
        for node in [] if graph is None else graph.nodes:
            if run and node.args and node.args[0] is run[-1] and self._is_closed(name, node):
                run.append(node)
            elif not run and self._is_closed(name, node):
                run = [node]
            if run and (len(run[-1].users) != 1 or not self._is_closed(name, next(iter(run[-1].users)))):
                yield [_join(name, str(one.target)) for one in run]
                run = []

    def _is_closed(self, parent: str, node: fx.Node) -> bool:
        child = _join(parent, str(node.target))
        return (
            node.op == "call_module"
            and _takes_one(node)
            and self._modules.get(child) in self._forwards.occurs_once
            and self._inside(child) is not None
        )

    def _inside(self, name: str) -> _Added | None:
        """What is in the module, if it can take some of the positions and return the same ones."""
        if name not in self._known:
            module = self._modules.get(name)
            self._known[name] = None if module is None or "forward" in vars(module) else self._look(name, module)
        return self._known[name]

    def _look(self, name: str, module: nn.Module) -> _Added | None:
        if hasattr(module, "as_fx_graph"):  # a stage of a pipeline, whose input is more than a tensor
            return None
        if type(module) in ELEMENTWISE:
            return {}
        if type(module) in SEQUENCE_LAYERS:
            is_own = all(len(self._forwards.holders[parameter]) == 1 for parameter in module.parameters())
            is_by_position = len(getattr(module, "normalized_shape", (1,))) == 1
            return {name: "sequence_parallel"} if is_own and is_by_position else None
        if type(module) is nn.TransformerEncoderLayer:
            return self._encoder_layer(name)
        graph = trace(module, only_input=True) if next(module.children(), None) is not None else None
        if graph is None:
            return None
        added = self._read(name, graph)
        # Where an attention asks for the length of its input, positions are gathered before it.
        is_attention = "heads" in self._entries.get(name, {})
        return self._read(name, graph, gathers_before=True) if added is None and is_attention else added

    def _encoder_layer(self, name: str) -> _Added | None:
        """torch's own, whose forward has too many ways to be traced."""
        attention, first, second = (_join(name, key) for key in ("self_attn", "linear1", "linear2"))
        between = [self._inside(_join(name, key)) for key in ("norm1", "dropout1", "norm2", "dropout2")]
        styles = [set(self._entries.get(one, {})) for one in (attention, first, second)]
        if styles != [{"attention"}, {"colwise"}, {"rowwise"}]:
            return None
        added = {attention: "gather_sequence + scatter_sequence", first: "gather_sequence", second: "scatter_sequence"}
        for one in between:
            if one is None:
                return None
            added |= one
        return added

    def _read(self, name: str, graph: fx.Graph, gathers_before: bool = False) -> _Added | None:
        """Follow the input through the module's own forward.

        Args:
            gathers_before: whether positions are gathered before the module, and not by its colwise layers.
        """
        kinds: dict[fx.Node, _Kind] = {}
        added = {name: "gather_sequence"} if gathers_before else {}
        for node in graph.nodes:
            every = {kinds[before] for before in node.all_input_nodes}
            given = every - {"other"}
            if node.op == "placeholder":
                kinds[node] = "other" if kinds else ("whole" if gathers_before else "positions")
            elif node.op == "output":
                return added if isinstance(node.args[0], fx.Node) and given == {"positions"} else None
            elif not given:
                kinds[node] = "other"
            elif len(given) > 1 or (every != given and given != {"features"}):
                return None  # what is the same everywhere may have something of its own for every position
            else:
                step = self._step(name, node, given.pop())
                if step is None:
                    return None
                kinds[node] = step[0]
                added |= step[1]
        return None

    def _step(self, name: str, node: fx.Node, given: _Kind) -> tuple[_Kind, _Added] | None:
        """The output of a call for this input, and what it adds to styles; None if it needs more than a worker has."""
        child = _join(name, str(node.target))
        entry = self._entries.get(child, {}) if node.op == "call_module" and _takes_one(node) else {}
        if entry and self._modules.get(child) not in self._forwards.occurs_once:
            return None
        if entry.keys() & {"colwise", "packed_colwise"} and "gather_output" not in entry:
            # A layer with the same input as another one gets what is gathered for that.
            style = "local_input" if given == "whole" else "gather_sequence"
            added = {} if "same_input" in entry else {child: style}
            return ("features", added) if given in ("positions", "whole") else None
        if "rowwise" in entry:
            return ("positions", {child: "scatter_sequence"}) if given == "features" else None
        if given == "features":  # a slice of them can be treated so: that was found out when the layers were shared
            return "features", {}
        if node.target is getattr and node.args[1] in _ABOUT_TENSORS - ({"shape"} if given == "positions" else set()):
            return "other", {}
        if given == "whole":
            return ("other", {}) if node.op == "call_method" and node.target in ("size", "dim") else None
        if self._is_closed(name, node):
            inside = self._inside(child)
            return None if inside is None else ("positions", inside)
        return ("positions", {}) if is_elementwise(node, None) or _is_sum(node) else None


def _takes_one(node: fx.Node) -> bool:
    """Whether the call has one tensor, as its first argument."""
    return bool(node.args) and isinstance(node.args[0], fx.Node) and len(node.all_input_nodes) == 1


def _is_sum(node: fx.Node) -> bool:
    """A sum or product of values that are all of the same positions, or numbers."""
    return node.op == "call_function" and node.target in _SUMS and not node.kwargs and len(node.args) == 2


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
