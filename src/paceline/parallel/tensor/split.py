"""`tensor_parallel`: which layers of a model the workers of the tensor axis share, and how; done in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.conv import _ConvNd

from paceline.errors import ModelError
from paceline.parallel.tensor.attention import Heads, check_heads, find_heads
from paceline.parallel.tensor.axis import Axis, degrees_that_fit, everybody_has_some
from paceline.parallel.tensor.chains import ELEMENTWISE, Chains, ConvolutionRun, Pair
from paceline.parallel.tensor.conv import CHANNEL_CONVS, entry_of, why_whole
from paceline.parallel.tensor.exchange import enter, gather
from paceline.parallel.tensor.layout import Adjusted, SplitLayer, Stretch, TensorLayout
from paceline.parallel.tensor.linear import (
    ColumnLinear,
    Entrance,
    PartDropout,
    RowLinear,
    TiedClassifier,
    VocabularyEmbedding,
)
from paceline.parallel.tensor.multihead import HeadsAttention, can_divide
from paceline.parallel.tensor.positions import NORMS, Positions, PositionsDropout
from paceline.parallel.tensor.sequence import find_stretches

LARGE = 1 << 15
"""Weights from which a linear layer that stands alone, or an embedding, is worth an exchange of its own."""


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    whole: Collection[str] = (),
    large: int = LARGE,
    sequence_parallel: bool = False,
) -> TensorLayout:
    """Let the workers of `mesh`, one axis, compute a part each of the layers of `model`; a common act of them.

    Shared are linear layers that follow each other (columns, then rows: one sum), attention by its heads, convolutions
    by output channels or groups, embeddings by words, and what large linear layers are left by output features.
    What goes into the model and comes out of it stays plain and whole on every worker. Parameters of which a worker
    holds a part become DTensors; all others stay as they are and get the true gradient, the same on every worker.
    All workers have the same weights before, or weights on the meta device.

    Args:
        whole: names of modules that are left alone, with all that is in them.
        large: weights from which a single linear layer or an embedding is shared.
        sequence_parallel: whether workers keep a part each of the positions of what passes between such layers.

    Raises:
        ModelError: the heads of an attention do not divide by the degree, or `whole` names what is not there.
    """
    axis = Axis(mesh)
    layout = find_layout(model, axis.degree, whole=whole, large=large, sequence_parallel=sequence_parallel)
    _apply(model, axis, layout)
    return layout


def find_layout(
    model: nn.Module,
    degree: int,
    *,
    whole: Collection[str] = (),
    large: int = LARGE,
    sequence_parallel: bool = False,
) -> TensorLayout:
    """What `tensor_parallel` would do on `degree` workers; changes nothing and needs no workers."""
    if degree == 1:
        return TensorLayout(1, ())
    finder = _LayoutFinder(model, degree, whole, large)
    finder.attention()
    finder.multihead_attention()
    finder.pairs()
    finder.convolutions()
    finder.embeddings()
    finder.large_layers()
    if sequence_parallel:
        finder.stretches_of_positions()
    return TensorLayout(
        degree,
        tuple(finder.layers.values()),
        tuple(finder.notes),
        tuple(finder.dropouts),
        tuple(finder.adjusted),
        finder.stretches,
    )


class _LayoutFinder:
    """What was found so far; what comes first has the first choice."""

    def __init__(self, model: nn.Module, degree: int, whole: Collection[str], large: int) -> None:
        self.layers: dict[str, SplitLayer] = {}
        self.notes: list[str] = []
        self.dropouts: list[tuple[str, int]] = []
        self.adjusted: list[Adjusted] = []
        self.stretches: tuple[Stretch, ...] = ()
        self._model = model
        self._degree = degree
        self._large = large
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for name in whole:
            if name not in names:
                raise ModelError(
                    f"There is no module '{name}' in the model that could be left whole; write the name as "
                    "model.named_modules() has it."
                )
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if not any(name == other or name.startswith(f"{other}.") or not other for other in whole)
        }
        self._chains = chains = Chains(model)
        self._holders = chains.holders
        found = [chains.of(name) for name in self._modules]
        self._pairs: list[Pair] = [pair for pairs, _ in found for pair in pairs]
        self._runs: dict[str, ConvolutionRun] = {run.conv: run for _, runs in found for run in runs}

    def _is_free(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether the layer is exactly of this kind, nobody's yet, and the only one that holds its parameters."""
        layer = self._modules.get(name)
        return (
            type(layer) is kind
            and name not in self.layers
            and "forward" not in vars(layer)
            and isinstance(layer._parameters.get("weight"), nn.Parameter)
            and all(len(self._holders[parameter]) == 1 for parameter in layer.parameters())
        )

    def attention(self) -> None:
        tried: dict[tuple[Any, ...], Heads | None] = {}
        for name, module in self._modules.items():
            numbers = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
            looks = (type(module), repr(module), tuple(sorted(numbers.items())))
            if looks not in tried:
                tried[looks] = find_heads(name, module, self._degree)
            heads = tried[looks]
            if heads is not None:
                self._add_heads(name, heads)

    def _add_heads(self, name: str, heads: Heads) -> None:
        prefix = f"{name}." if name else ""
        inputs, output = [prefix + key for key in heads.inputs], prefix + heads.output
        if not all(self._is_free(layer, nn.Linear) for layer in (*inputs, output)):
            return
        for layer in inputs:
            entrance = inputs[0] if heads.shares_input and len(inputs) > 1 else ""
            linear = cast(nn.Linear, self._modules[layer])
            self.layers[layer] = SplitLayer(
                layer,
                "heads",
                "whole" if not entrance or layer == entrance else "shared",
                "part",
                linear.out_features,
                layer,
                entrance,
                heads.num_blocks,
                linear.in_features + (linear.bias is not None),
            )
        width = cast(nn.Linear, self._modules[output]).out_features
        self.layers[output] = SplitLayer(output, "rows", "part", "sum", width, output)
        self.adjusted.append(Adjusted(name, tuple(heads.own_numbers.items())))

    def multihead_attention(self) -> None:
        for name, module in self._modules.items():
            if type(module) is not nn.MultiheadAttention:
                continue
            shared = any(len(self._holders[parameter]) > 1 for parameter in module.parameters())
            if shared or not can_divide(module):
                self.notes.append(f"The attention '{name}' stays whole on each of {self._degree} workers.")
                continue
            check_heads(name, module.num_heads, self._degree)
            row_size = module.embed_dim + (module.in_proj_bias is not None)
            self.layers[name] = SplitLayer(
                name, "attention", "whole", "sum", 3 * module.embed_dim, name, num_blocks=3, row_size=row_size
            )
            if module.dropout > 0:
                self.notes.append(
                    f"'{name}' draws the dropout of its attention weights as a CPU does; the fused kernels that one "
                    "GPU would use draw other numbers."
                )

    def pairs(self) -> None:
        for pair in (*self._transformer_pairs(), *self._pairs):
            if not all(self._is_free(name, nn.Linear) for name in (*pair.columns, pair.rows)):
                continue
            rows = cast(nn.Linear, self._modules[pair.rows])
            if not everybody_has_some(rows.in_features, self._degree):
                self.notes.append(
                    f"'{pair.columns[0]}' and '{pair.rows}' with {rows.in_features} features between them are not "
                    f"shared by {self._degree} workers; use {degrees_that_fit(rows.in_features)}."
                )
                continue
            for name in pair.columns:
                entrance = pair.columns[0] if pair.shares_input and len(pair.columns) > 1 else ""
                entry: Any = "shared" if entrance and name != entrance else "whole"
                self.layers[name] = SplitLayer(name, "columns", entry, "part", rows.in_features, name, entrance)
            self.layers[pair.rows] = SplitLayer(pair.rows, "rows", "part", "sum", rows.out_features, pair.rows)
            self.dropouts.extend((name, rows.in_features) for name in pair.dropouts)

    def _transformer_pairs(self) -> Iterator[Pair]:
        """torch's own transformer layers, whose forward has too many ways to be traced."""
        for name, module in self._modules.items():
            prefix = f"{name}." if name else ""
            if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
                activation = cast(Any, module).activation
                if activation in (F.relu, F.gelu) or type(activation) in ELEMENTWISE:
                    yield Pair((f"{prefix}linear1",), f"{prefix}linear2", (f"{prefix}dropout",), True)

    def convolutions(self) -> None:
        entries: dict[str, Any] = {}
        for name, module in self._modules.items():
            if type(module) not in CHANNEL_CONVS or not self._is_free(name, type(module)):
                continue
            entry = entry_of(cast(_ConvNd, module), self._degree)
            if entry is None:
                self.notes.append(why_whole(name, cast(_ConvNd, module), self._degree))
            else:
                entries[name] = entry
        for name, entry in entries.items():
            length = cast(_ConvNd, self._modules[name]).out_channels
            run = self._runs.get(name, ConvolutionRun(name, name, None))
            # Whole groups of the next layer lie where this one's channels are, if both are cut evenly.
            if entries.get(run.next_conv or "") == "slice" and length % self._degree == 0:
                self.layers[name] = SplitLayer(name, "channels", entry, "part", length, name)
                entries[cast(str, run.next_conv)] = "part"
            else:
                self.layers[name] = SplitLayer(name, "channels", entry, "gather", length, run.last)
        for name, entry in entries.items():
            self.layers[name] = replace(self.layers[name], entry=entry)

    def embeddings(self) -> None:
        for name, module in self._modules.items():
            if type(module) is not nn.Embedding or module.weight.numel() < self._large:
                continue
            holders = self._holders[cast(nn.Parameter, module.weight)]
            classifiers = [other for other in holders if other != name]
            if module.max_norm is not None or module.sparse or not all(map(self._is_classifier, classifiers)):
                self.notes.append(f"The embedding '{name}' is used in a way that needs all of it: it stays whole.")
            elif not everybody_has_some(module.num_embeddings, self._degree):
                self.notes.append(
                    f"The embedding '{name}' has too few rows for {self._degree} workers: it stays whole; use "
                    f"{degrees_that_fit(module.num_embeddings)}."
                )
            else:
                length = module.num_embeddings
                self.layers[name] = SplitLayer(name, "vocabulary", "part", "sum", length, name)
                for other in classifiers:
                    self.layers[other] = SplitLayer(other, "columns", "whole", "gather", length, other)

    def _is_classifier(self, name: str) -> bool:
        layer = self._modules.get(name)
        return (
            type(layer) is nn.Linear
            and name not in self.layers
            and (layer.bias is None or len(self._holders[layer.bias]) == 1)
        )

    def large_layers(self) -> None:
        for name, module in self._modules.items():
            if not self._is_free(name, nn.Linear) or cast(nn.Linear, module).weight.numel() < self._large:
                continue
            length = cast(nn.Linear, module).out_features
            if everybody_has_some(length, self._degree):
                self.layers[name] = SplitLayer(name, "columns", "whole", "gather", length, name)
            else:
                self.notes.append(
                    f"'{name}' with {length} output features is not shared by {self._degree} workers and stays whole "
                    f"on each; use {degrees_that_fit(length)}."
                )

    def stretches_of_positions(self) -> None:
        attentions = {adjusted.name for adjusted in self.adjusted}
        self.stretches = find_stretches(self._model, self._modules, self.layers, attentions, self._chains)
        num_pairs = sum(layer.style in ("rows", "attention") for layer in self.layers.values())
        num_found = sum(len(stretch.rows) for stretch in self.stretches)
        if num_found < num_pairs or not num_found:
            self.notes.append(
                f"Sequence parallelism: {num_found} of {num_pairs} pairs of layers follow each other with nothing but "
                "norms, dropout and sums between them; what passes between others stays whole on each worker."
            )
        for stretch in self.stretches:
            entered: set[str] = set()
            for name in dict.fromkeys((*stretch.columns, *stretch.rows)):
                layer = self.layers[name]
                # A door gathers once for all.
                door = next((door for door in stretch.doors if name.startswith(f"{door}.")), "")
                if name in stretch.columns and layer.entry == "whole" and door not in entered:
                    layer = replace(layer, entry="positions")
                    entered |= {door} - {""}
                self.layers[name] = replace(layer, exit="positions") if name in stretch.rows else layer


def _apply(model: nn.Module, axis: Axis, layout: TensorLayout) -> None:
    modules = dict(model.named_modules())
    entrances: dict[str, Entrance] = {}
    parts: dict[Tensor, nn.Parameter] = {}
    inside = _apply_stretches(modules, axis, layout)
    for layer in layout.layers:
        module: Any = modules[layer.name]
        module.axis = axis
        gathers = layer.exit == "gather" and layer.exits_after == layer.name
        if layer.style in ("columns", "heads"):
            door = layer.entrance or layer.name
            if door not in entrances:
                num_layers = sum((other.entrance or other.name) == door for other in layout.layers)
                entrances[door] = Entrance(inside.get(layer.name, lambda whole: enter(whole, axis)), num_layers)
            module.__class__ = ColumnLinear
            module.entrance, module.gathers, module.num_blocks = entrances[door], gathers, layer.num_blocks
        elif layer.style == "rows":
            module.__class__ = RowLinear
        elif layer.style == "attention":
            module.__class__ = HeadsAttention
            _shard(module.out_proj, 1, axis, parts)
        elif layer.style == "vocabulary":
            module.__class__ = VocabularyEmbedding
        else:
            module.__class__ = CHANNEL_CONVS[type(module)]
            module.entry, module.gathers = layer.entry, gathers
        _shard(module, 1 if layer.style == "rows" else 0, axis, parts)
        if layer.exit == "gather" and not gathers:
            modules[layer.exits_after].register_forward_hook(_GatherBehind(axis, layer.length))
    for name, length in layout.dropouts:
        dropout: Any = modules[name]
        dropout.__class__ = PartDropout
        dropout.axis, dropout.length = axis, length
    for adjusted in layout.adjusted:
        for attribute, number in adjusted.numbers:
            setattr(modules[adjusted.name], attribute, number)
    _leave_fast_paths(model, layout)
    if any(layer.style == "vocabulary" for layer in layout.layers):
        hooks = _TiedClassifierAround(axis)
        model.register_forward_pre_hook(hooks.before)
        model.register_forward_hook(hooks.after, always_call=True)


def _apply_stretches(
    modules: Mapping[str, Any], axis: Axis, layout: TensorLayout
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Let positions be parted and gathered; returns what the entrances of column layers there have to do."""
    entering: dict[str, Callable[[Tensor], Tensor]] = {}
    for stretch in layout.stretches:
        positions = Positions(axis)
        for name, _ in stretch.norms:
            modules[name].__class__ = NORMS[type(modules[name])]
        for name in stretch.dropouts:
            modules[name].__class__ = PositionsDropout
        for name in (*(name for name, _ in stretch.norms), *stretch.dropouts, *stretch.rows):
            modules[name].positions = positions
        modules[stretch.first].register_forward_pre_hook(_Replace(positions.begin), with_kwargs=True)
        for name in stretch.doors:
            modules[name].register_forward_pre_hook(_Replace(positions.gather), with_kwargs=True)
        for name in stretch.columns:
            has_door = any(name.startswith(f"{door}.") for door in stretch.doors)
            entering[name] = _as_it_is if has_door else positions.gather
        modules[stretch.last].register_forward_hook(lambda _, __, own, positions=positions: positions.end(own))
    return entering


def _as_it_is(whole: Tensor) -> Tensor:
    return whole


def _shard(module: nn.Module, dim: int, axis: Axis, parts: dict[Tensor, nn.Parameter]) -> None:
    """Leave this worker's part of the module's parameters; a bias of rows, added to their sum, stays whole.

    `parts` knows what has become of parameters that several modules hold.
    """
    for key, parameter in list(module._parameters.items()):
        if parameter is None or parameter.dim() <= dim:
            continue
        if parameter not in parts:
            own = distribute_tensor(parameter.detach(), axis.mesh, [Shard(dim)], src_data_rank=None)
            # A view would keep the whole tensor in memory.
            local = own.to_local().contiguous()
            if local.untyped_storage().size() > local.numel() * local.element_size():
                local = local.clone()
            own = DTensor.from_local(
                local, axis.mesh, [Shard(dim)], run_check=False, shape=own.shape, stride=own.stride()
            )
            parts[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
        module._parameters[key] = parts[parameter]


def _leave_fast_paths(model: nn.Module, layout: TensorLayout) -> None:
    """torch's transformer layers hand their parameters to one fused kernel in evaluation, which wants them whole."""
    changed = {name.rpartition(".")[0] for name in (layer.name for layer in layout.layers)}
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and name in changed:
            cast(Any, module).activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


@dataclass(frozen=True)
class _Replace:
    """A forward pre-hook: a module takes something else in place of its one input."""

    act: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        more = [value for value in (*args[1:], *kwargs.values()) if value is not None]
        # torch's own layer may have masks, which are the attention's.
        if not args or (more and type(module) is not nn.TransformerEncoderLayer):
            raise ModelError(
                f"A module ({type(module).__name__}) before which workers share out positions has to be called with "
                "one tensor and nothing else: leave sequence parallelism out, or call it so."
            )
        return (self.act(args[0]), *args[1:]), kwargs


@dataclass(frozen=True)
class _GatherBehind:
    """A forward hook: the layers up to this one have worked on the worker's own channels."""

    axis: Axis
    length: int

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return gather(output, 1, self.length, self.axis)


class _TiedClassifierAround:
    """Forward hooks: the model runs inside of a `TiedClassifier`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._open: list[ExitStack] = []

    def before(self, _module: nn.Module, _args: Any) -> None:
        opened = ExitStack()
        opened.enter_context(TiedClassifier(self._axis))
        self._open.append(opened)

    def after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._open.pop().close()
