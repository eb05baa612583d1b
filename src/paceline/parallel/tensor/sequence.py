"""Sequence parallelism: between pairs of shared layers every worker keeps its part of the positions.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2: norms, dropout
and sums between a row layer and the next column layer treat every position by itself, so a worker needs its part of
them only. The row layer's sum becomes a scatter of sums along the positions and the next column layer's entrance a
gather of them, and in backward the other way round: what a ring sends for one sum.

Positions are the last dimension but one of what passes through: (..., positions, width).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx, nn

from paceline.parallel.tensor.chains import ELEMENTWISE, PRODUCTS_AND_SUMS, Chains, is_elementwise, trace
from paceline.parallel.tensor.layout import SplitLayer, Stretch
from paceline.parallel.tensor.positions import NORMS

_MIN_PAIRS = 2
"""One pair alone would be cut into positions and put together again for nothing."""

_Kind = Literal["other", "positions", "whole", "features"]
"""What a value is on a worker: the same everywhere; its part of the positions; all of them, to be given to column
layers; or what these make of it, up to the row layer."""
_ABOUT_TENSORS = {"shape", "dtype", "device"}
_SUMS = PRODUCTS_AND_SUMS | {operator.sub, torch.sub}


@dataclass(frozen=True)
class _Inside:
    """What there is in modules that take a part of the positions and return the same part."""

    norms: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    doors: tuple[str, ...] = ()

    def __add__(self, other: _Inside) -> _Inside:
        return _Inside(
            self.norms + other.norms,
            self.dropouts + other.dropouts,
            self.columns + other.columns,
            self.rows + other.rows,
            self.doors + other.doors,
        )


def find_stretches(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    layers: Mapping[str, SplitLayer],
    attentions: Collection[str],
    chains: Chains,
) -> tuple[Stretch, ...]:
    """Where positions can be shared out.

    Args:
        modules: those that may be changed.
        layers: which of them are shared out, and how.
        attentions: modules of which workers compute some heads each; they may ask for the length of their input.
    """
    return tuple(_StretchFinder(model, modules, layers, attentions, chains).stretches(""))


class _StretchFinder:
    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        layers: Mapping[str, SplitLayer],
        attentions: Collection[str],
        chains: Chains,
    ) -> None:
        self._model = model
        self._modules = modules
        self._layers = layers
        self._attentions = attentions
        self._chains = chains
        self._known: dict[str, _Inside | None] = {}
        self._graphs: dict[str, fx.Graph | None] = {}
        self._taken: set[str] = set()

    def stretches(self, name: str) -> Iterator[Stretch]:
        """Those in the module `name`: itself, neighbours among the modules it calls, or some inside of these."""
        if name in self._taken:
            return
        runs = [[name]] if self._inside(name) is not None else list(self._runs(name))
        for run in runs:
            found = sum(filter(None, map(self._inside, run)), _Inside())
            if len(found.rows) >= _MIN_PAIRS:
                norms = tuple((norm, _num_trained(self._modules[norm])) for norm in found.norms)
                yield Stretch(run[0], run[-1], norms, found.dropouts, found.columns, found.rows, found.doors)
            self._taken.update(run)
        for inner in self._called(name) if name not in self._taken else []:
            if self._model.get_submodule(inner) in self._chains.occurs_once:
                yield from self.stretches(inner)

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
            and self._modules.get(child) in self._chains.occurs_once
            and self._inside(child) is not None
        )

    def _inside(self, name: str) -> _Inside | None:
        """What is in the module, if it can take a part of the positions and return the same part."""
        if name not in self._known:
            module = self._modules.get(name)
            self._known[name] = None if module is None or "forward" in vars(module) else self._look(name, module)
        return self._known[name]

    def _look(self, name: str, module: nn.Module) -> _Inside | None:
        if hasattr(module, "as_fx_graph"):  # a stage of a pipeline, whose input is more than a tensor
            return None
        if type(module) in ELEMENTWISE:
            return _Inside()
        if type(module) is nn.Dropout:
            return _Inside(dropouts=(name,))
        if type(module) in NORMS:
            is_own = all(len(self._chains.holders[parameter]) == 1 for parameter in module.parameters())
            return _Inside(norms=(name,)) if is_own and len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
        if type(module) is nn.TransformerEncoderLayer:
            return self._encoder_layer(name)
        graph = trace(module, only_input=True) if next(module.children(), None) is not None else None
        if graph is None:
            return None
        found = self._read(name, graph)
        # Who asks for the length of the input gets it where the positions are gathered for the whole attention.
        return self._read(name, graph, has_door=True) if found is None and name in self._attentions else found

    def _encoder_layer(self, name: str) -> _Inside | None:
        """torch's own, whose forward has too many ways to be traced."""
        attention, first, second = (_join(name, key) for key in ("self_attn", "linear1", "linear2"))
        between = [self._inside(_join(name, key)) for key in ("norm1", "dropout1", "norm2", "dropout2")]
        styles = [self._layers[one].style if one in self._layers else "" for one in (attention, first, second)]
        if styles != ["attention", "columns", "rows"] or self._layers[first].exit != "part" or None in between:
            return None
        # Attention is a pair by itself, with a door of its own.
        return sum(filter(None, between), _Inside(columns=(attention, first), rows=(attention, second)))

    def _read(self, name: str, graph: fx.Graph, has_door: bool = False) -> _Inside | None:
        """Follow the input through the module's own forward.

        Args:
            has_door: whether positions are gathered before it, and not by its column layers.
        """
        kinds: dict[fx.Node, _Kind] = {}
        found = _Inside(doors=(name,) if has_door else ())
        for node in graph.nodes:
            every = {kinds[before] for before in node.all_input_nodes}
            given = every - {"other"}
            if node.op == "placeholder":
                kinds[node] = "other" if kinds else ("whole" if has_door else "positions")
            elif node.op == "output":
                return found if isinstance(node.args[0], fx.Node) and given == {"positions"} else None
            elif not given:
                kinds[node] = "other"
            elif len(given) > 1 or (every != given and given != {"features"}):
                return None  # what is the same everywhere may have something of its own for every position
            else:
                step = self._step(name, node, given.pop())
                if step is None:
                    return None
                kinds[node] = step[0]
                found += step[1]
        return None

    def _step(self, name: str, node: fx.Node, given: _Kind) -> tuple[_Kind, _Inside] | None:
        """What one call makes of such an input, and what is in it; None if that needs more than the worker has."""
        child = _join(name, str(node.target))
        layer = self._layers.get(child) if node.op == "call_module" and _takes_one(node) else None
        if layer is not None and self._modules.get(child) not in self._chains.occurs_once:
            return None
        if layer is not None and layer.style in ("columns", "heads") and layer.exit == "part":
            return ("features", _Inside(columns=(child,))) if given in ("positions", "whole") else None
        if layer is not None and layer.style == "rows":
            return ("positions", _Inside(rows=(child,))) if given == "features" else None
        if given == "features":  # a part of them can be treated so: that was found out when the layers were shared
            return "features", _Inside()
        if node.target is getattr and node.args[1] in _ABOUT_TENSORS - ({"shape"} if given == "positions" else set()):
            return "other", _Inside()
        if given == "whole":
            return ("other", _Inside()) if node.op == "call_method" and node.target in ("size", "dim") else None
        if self._is_closed(name, node):
            inside = self._inside(child)
            return None if inside is None else ("positions", inside)
        return ("positions", _Inside()) if is_elementwise(node, None) or _is_sum(node) else None


def _takes_one(node: fx.Node) -> bool:
    """Whether the call has one tensor, as its first argument."""
    return bool(node.args) and isinstance(node.args[0], fx.Node) and len(node.all_input_nodes) == 1


def _is_sum(node: fx.Node) -> bool:
    """A sum or product of values that are all parts of the same positions, or numbers."""
    return node.op == "call_function" and node.target in _SUMS and not node.kwargs and len(node.args) == 2


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
