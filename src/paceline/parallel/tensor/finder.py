"""Finds a tensor plan for a model: which of its layers workers can share, and how; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd

from paceline.parallel.tensor.attention import Heads, find_heads
from paceline.parallel.tensor.multihead import has_divisible_heads
from paceline.parallel.tensor.pairs import ELEMENTWISE, ConvolutionRun, Pair, TracedForwards
from paceline.parallel.tensor.plan import LAYER_STYLES, TensorPlan, check_heads
from paceline.parallel.tensor.region_finder import add_sequence_regions
from paceline.parallel.tensor.slices import degrees_that_fit, every_worker_has_some

LARGE = 1 << 15
"""Weights from which a linear layer that stands alone, or an embedding, is worth an exchange of its own."""


def find_plan(model: nn.Module, degree: int, *, large: int = LARGE, sequence_parallel: bool = False) -> TensorPlan:
    """How `degree` workers can share the layers of `model`; needs no workers.

    Shared are linear layers that follow each other (colwise, then rowwise: one sum), attention by its heads,
    convolutions by output channels or groups, embeddings by words, and what large linear layers are left by output
    features.

    Args:
        large: weights from which a single linear layer or an embedding is shared.
        sequence_parallel: whether workers keep their own positions of what passes between such layers.

    Raises:
        ModelError: the heads of an attention do not divide by the degree.
    """
    if degree == 1:
        return TensorPlan(1, {})
    finder = _PlanFinder(model, degree, large)
    finder.attention()
    finder.multihead_attention()
    finder.pairs()
    finder.convolutions()
    finder.embeddings()
    finder.large_layers()
    styles = {name: finder.styles[name] for name, _ in model.named_modules() if name in finder.styles}
    plan = TensorPlan(degree, styles, tuple(finder.notes))
    return add_sequence_regions(model, plan) if sequence_parallel else plan


class _PlanFinder:
    """What was found so far; what comes first has the first choice."""

    def __init__(self, model: nn.Module, degree: int, large: int) -> None:
        self.styles: dict[str, str] = {}
        self.notes: list[str] = []
        self._degree = degree
        self._large = large
        self._modules = dict(model.named_modules())
        traced = TracedForwards(model)
        self._holders = traced.holders
        found = [traced.pairs_and_runs(name) for name in self._modules]
        self._pairs = [pair for pairs, _ in found for pair in pairs]
        self._runs = {run.conv: run for _, runs in found for run in runs}

    def _is_free(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether the layer is exactly of this kind, not shared yet, and the only one that holds its parameters."""
        layer = self._modules.get(name)
        return (
            type(layer) is kind
            and name not in self.styles
            and "forward" not in vars(layer)
            and isinstance(layer._parameters.get("weight"), nn.Parameter)
            and all(len(self._holders[parameter]) == 1 for parameter in layer.parameters())
        )

    def attention(self) -> None:
        found = self._find_heads()
        divided = {type(self._modules[name]) for name, heads in found.items() if heads is not None}
        # Attentions of one kind may hand each other something of all heads, such as a bias for relative positions.
        whole = divided & {type(self._modules[name]) for name, heads in found.items() if heads is None}
        for kind in whole:
            self.notes.append(f"The attentions {kind.__name__} stay whole: heads of some of them cannot be divided.")
        for name, heads in found.items():
            if heads is None or type(self._modules[name]) in whole:
                continue
            prefix = f"{name}." if name else ""
            inputs, output = [prefix + key for key in heads.inputs], prefix + heads.output
            if all(self._is_free(layer, nn.Linear) for layer in (*inputs, output)):
                style = "colwise" if heads.num_blocks == 1 else f"packed_colwise({heads.num_blocks})"
                self._add_columns(inputs, style, heads.has_one_input)
                self.styles[output] = "rowwise"
                self.styles[name] = f"heads({', '.join(heads.own_numbers)})"

    def _find_heads(self) -> dict[str, Heads | None]:
        tried: dict[tuple[Any, ...], Heads | None] = {}
        found = {}
        for name, module in self._modules.items():
            numbers = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
            looks = (type(module), repr(module), tuple(sorted(numbers.items())))
            if looks not in tried:
                tried[looks] = find_heads(name, module, self._degree)
            found[name] = tried[looks]
        return found

    def _add_columns(self, names: list[str], style: str, has_one_input: bool) -> None:
        for name in names:
            follows = has_one_input and name != names[0]
            self.styles[name] = f"{style} + same_input({names[0]})" if follows else style

    def multihead_attention(self) -> None:
        for name, module in self._modules.items():
            if type(module) is not nn.MultiheadAttention:
                continue
            is_shared = any(len(self._holders[parameter]) > 1 for parameter in module.parameters())
            if is_shared or not has_divisible_heads(module):
                self.notes.append(f"The attention '{name}' stays whole on each of {self._degree} workers.")
                continue
            check_heads(name, module.num_heads, self._degree)
            self.styles[name] = "attention"
            if module.dropout > 0:
                self.notes.append(
                    f"'{name}' draws the dropout of its attention weights as a CPU does; the fused kernels that one "
                    "GPU would use draw other numbers."
                )

    def pairs(self) -> None:
        for pair in (*self._transformer_pairs(), *self._pairs):
            if not all(self._is_free(name, nn.Linear) for name in (*pair.columns, pair.rows)):
                continue
            width = cast(nn.Linear, self._modules[pair.rows]).in_features
            if not every_worker_has_some(width, self._degree):
                self.notes.append(
                    f"'{pair.columns[0]}' and '{pair.rows}' with {width} features between them are not "
                    f"shared by {self._degree} workers; use {degrees_that_fit(width)}."
                )
                continue
            self._add_columns(list(pair.columns), "colwise", pair.has_one_input)
            self.styles[pair.rows] = "rowwise"
            self.styles |= dict.fromkeys(pair.dropouts, f"local_dropout({width})")

    def _transformer_pairs(self) -> Iterator[Pair]:
        """torch's own transformer layers, whose forward has too many ways to be traced."""
        for name, module in self._modules.items():
            prefix = f"{name}." if name else ""
            if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
                activation = cast(Any, module).activation
                if activation in (F.relu, F.gelu) or type(activation) in ELEMENTWISE:
                    yield Pair((f"{prefix}linear1",), f"{prefix}linear2", (f"{prefix}dropout",), True)

    def convolutions(self) -> None:
        inputs: dict[str, str] = {}
        for name, module in self._modules.items():
            if type(module) in LAYER_STYLES["channels"] and self._is_free(name, type(module)):
                modifier = _channels_input(cast(_ConvNd, module), self._degree)
                if modifier is None:
                    self.notes.append(_why_whole(name, cast(_ConvNd, module), self._degree))
                else:
                    inputs[name] = modifier
        outputs = dict.fromkeys(inputs, "")
        for name in inputs:
            run = self._runs.get(name, ConvolutionRun(name, name, None))
            # Whole groups of the next layer lie where this one's channels are, if both are cut evenly.
            is_even = cast(_ConvNd, self._modules[name]).out_channels % self._degree == 0
            if run.next_conv is not None and inputs.get(run.next_conv) == " + split_input" and is_even:
                inputs[run.next_conv] = " + local_input"
            elif run.last == name:
                outputs[name] = " + gather_output"
            else:
                self.styles[run.last] = f"gather_channels({name})"
        for name in inputs:
            self.styles[name] = f"channels{inputs[name]}{outputs[name]}"

    def embeddings(self) -> None:
        for name, module in self._modules.items():
            if type(module) is not nn.Embedding or module.weight.numel() < self._large:
                continue
            holders = self._holders[cast(nn.Parameter, module.weight)]
            classifiers = [other for other in holders if other != name]
            if module.max_norm is not None or module.sparse or not all(map(self._is_classifier, classifiers)):
                self.notes.append(f"The embedding '{name}' is used in a way that needs all of it: it stays whole.")
            elif not every_worker_has_some(module.num_embeddings, self._degree):
                self.notes.append(
                    f"The embedding '{name}' has too few rows for {self._degree} workers: it stays whole; use "
                    f"{degrees_that_fit(module.num_embeddings)}."
                )
            else:
                self.styles[name] = "embedding_rowwise"
                self.styles |= dict.fromkeys(classifiers, "colwise_gather_output")

    def _is_classifier(self, name: str) -> bool:
        layer = self._modules.get(name)
        return (
            type(layer) is nn.Linear
            and name not in self.styles
            and (layer.bias is None or len(self._holders[layer.bias]) == 1)
        )

    def large_layers(self) -> None:
        for name, module in self._modules.items():
            if not self._is_free(name, nn.Linear) or cast(nn.Linear, module).weight.numel() < self._large:
                continue
            length = cast(nn.Linear, module).out_features
            if every_worker_has_some(length, self._degree):
                self.styles[name] = "colwise_gather_output"
            else:
                self.notes.append(
                    f"'{name}' with {length} output features is not shared by {self._degree} workers and stays whole "
                    f"on each; use {degrees_that_fit(length)}."
                )


def _channels_input(layer: _ConvNd, degree: int) -> str | None:
    """What a whole input needs where `degree` workers share the layer; None if they cannot."""
    if layer.groups == 1:
        return "" if every_worker_has_some(layer.out_channels, degree) else None
    if layer.groups % degree == 0:
        return " + split_input"
    return "" if degree % layer.groups == 0 and layer.out_channels % degree == 0 else None


def _why_whole(name: str, layer: _ConvNd, degree: int) -> str:
    if layer.groups > 1:
        fits = f"a degree that divides its {layer.groups} groups would do: {degrees_that_fit(layer.groups)}"
    else:
        fits = f"use {degrees_that_fit(layer.out_channels)} workers"
    return (
        f"'{name}' with {layer.out_channels} output channels is not shared by {degree} workers and stays whole on "
        f"each; {fits}."
    )
