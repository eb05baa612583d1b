"""The tensor plan: which module of a model is shared how by the workers of the tensor axis.

A mapping from module names to styles, in the words of torch's `parallelize_module` and of transformers' `tp_plan`. It
can be printed, edited and given back; who made it, the user, the model or the finder, makes no difference to `apply`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.parallel.tensor.slices import degrees_that_fit, every_worker_has_some

STYLES = {
    "colwise": "a linear layer's output features are divided, and stay with their workers",
    "packed_colwise": "packed_colwise(n): as colwise, n matrices above each other in one weight: query, key, value",
    "rowwise": "a linear layer's input features are divided, and the products summed",
    "embedding_rowwise": "an embedding's words are divided, and what is looked up is summed",
    "channels": "a convolution's output channels, or its groups, are divided, and stay with their workers",
    "attention": "torch's nn.MultiheadAttention, its heads divided",
    "heads": "heads(num_heads, ...): these attributes of an attention module count the worker's own heads or features",
    "local_dropout": "local_dropout(n): dropout on the worker's own of n features, with the mask of one device",
    "sequence_parallel": "a norm or dropout on the worker's own positions",
    "same_input": "same_input(other): takes the same tensor as another colwise layer, whose gradient is summed once",
    "local_input": "takes its input as it is on each worker",
    "split_input": "takes the worker's own features or channels of an input that is whole on each",
    "gather_output": "the output is gathered, whole on every worker",
    "gather_channels": "gather_channels(conv): behind this module, the channels of that convolution are gathered",
    "enter_sequence_region": "before this module, every worker takes its own positions",
    "leave_sequence_region": "behind this module, the positions are gathered",
    "gather_sequence": "the input's positions are gathered",
    "scatter_sequence": "of the output's sum every worker gets its own positions",
    "replicate": "whole on every worker",
}
_ALIASES = {
    "colwise_gather_output": "colwise + gather_output",
    "colwise_rep": "colwise + gather_output",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise + split_input",
}
LAYER_STYLES: dict[str, tuple[type[nn.Module], ...]] = {
    "colwise": (nn.Linear,),
    "packed_colwise": (nn.Linear,),
    "rowwise": (nn.Linear,),
    "embedding_rowwise": (nn.Embedding,),
    "channels": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "attention": (nn.MultiheadAttention,),
}
"""Styles that divide parameters, and the modules they are for."""
_MODULES = LAYER_STYLES | {"local_dropout": (nn.Dropout,), "sequence_parallel": (nn.LayerNorm, nn.RMSNorm, nn.Dropout)}

Entry = dict[str, tuple[str, ...]]
"""What a plan says of one module: styles, and their arguments."""


def parse_style(text: str) -> Entry:
    """ "packed_colwise(3) + gather_sequence" as {"packed_colwise": ("3",), "gather_sequence": ()}.

    Raises:
        ModelError: an unknown style.
    """
    entry: Entry = {}
    for word in " + ".join(_ALIASES.get(one.strip(), one) for one in text.split("+")).split("+"):
        found = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", word)
        if found is None or found[1] not in STYLES:
            hint = did_you_mean(word.strip(), [*STYLES, *_ALIASES])
            raise ModelError(
                f"The tensor plan has no style '{word.strip()}': {hint}The styles are "
                f"{', '.join([*STYLES, *_ALIASES])}; join several of one module by +."
            )
        entry[found[1]] = tuple(one.strip() for one in (found[2] or "").split(",") if one.strip())
    return entry


@dataclass(frozen=True)
class TensorPlan:
    """How `degree` workers share the modules of a model; what it does not name is whole on each of them."""

    degree: int
    styles: Mapping[str, str]
    """The style of each module by its name in the model, such as {"fc1": "colwise", "fc2": "rowwise"}."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the modules that stay whole."""

    def __str__(self) -> str:
        """A line for every module, those of equal blocks in one: "blocks.*.up: colwise"."""
        by_pattern: dict[str, set[str]] = {}
        for name, style in self.styles.items():
            by_pattern.setdefault(_pattern(name), set()).add(re.sub(r"\d+(?=\.)", "*", style))
        lines = dict.fromkeys(
            f"{_pattern(name)}: {re.sub(r'[0-9]+(?=[.])', '*', style)}"
            if len(by_pattern[_pattern(name)]) == 1
            else f"{name}: {style}"
            for name, style in self.styles.items()
        )
        return "\n".join(lines)

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: parse_style(style) for name, style in self.styles.items()}

    @property
    def layers(self) -> list[str]:
        """The modules whose own parameters are divided."""
        return [name for name, entry in self.entries.items() if entry.keys() & LAYER_STYLES.keys()]

    def of_layer(self, layer: str) -> TensorPlan:
        """What the plan says of one layer alone, the gathering of its output included."""
        return TensorPlan(
            self.degree,
            {
                name: style
                for name, style in self.styles.items()
                if name == layer or parse_style(style).get("gather_channels") == (layer,)
            },
        )


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def styles_of_model(model: nn.Module) -> dict[str, str]:
    """The plan that a model carries in the way of transformers: `_tp_plan`, or its configuration's; empty: none."""
    styles = getattr(model, "_tp_plan", None)
    if styles:
        return dict(styles)
    of_base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {f"{prefix}{name}": style for name, style in of_base.items()}


def given_plan(model: nn.Module, styles: Mapping[str, str], degree: int) -> TensorPlan:
    """A plan whose names may have a * for one part of a name, "layers.*.mlp.up_proj", checked against the model.

    Raises:
        ModelError: it names no such module or style, or the model cannot be shared so by `degree` workers.
    """
    modules = dict(model.named_modules())
    named: dict[str, str] = {}
    for pattern, style in styles.items():
        expression = re.escape(pattern).replace(r"\*", r"[^.]+")
        found = [name for name in modules if re.fullmatch(expression, name)]
        if not found:
            hint = did_you_mean(pattern, modules, "{}") or "write the name as model.named_modules() has it."
            raise ModelError(f"The tensor plan names '{pattern}', which this model does not have: {hint}")
        named |= dict.fromkeys(found, style)
    plan = TensorPlan(degree, {name: style for name, style in named.items() if style != "replicate"})
    check_plan(modules, plan)
    return plan


def check_plan(modules: Mapping[str, nn.Module], plan: TensorPlan) -> None:
    """Raises `ModelError` where the modules cannot be shared as the plan says."""
    entries = plan.entries
    for name, entry in entries.items():
        for style in entry.keys() & _MODULES.keys():
            if type(modules[name]) not in _MODULES[style]:
                raise ModelError(
                    f"The tensor plan's '{name}' is a {type(modules[name]).__name__}, and '{style}' is for "
                    f"{' or '.join(kind.__name__ for kind in _MODULES[style])}; give it another style, or none."
                )
        for style, arguments in entry.items():
            _check_length(name, modules, style, arguments, plan.degree)
    kept = {name: _kept_features(modules[name], entry) for name, entry in entries.items()}
    for parent in divided_attentions(modules, plan):
        for name, features in kept.items():
            if features and name.rpartition(".")[0] == parent:
                check_heads(name, features // int(getattr(modules[parent], "head_dim")), plan.degree)  # noqa: B009
    has_heads = any("heads" in entry for entry in entries.values())
    taken = [name for name, entry in entries.items() if "rowwise" in entry and "split_input" not in entry]
    for name in taken:
        width = getattr(modules[name], "in_features", 0)
        if not any(kept.values()) if has_heads else width not in kept.values():
            raise ModelError(
                f"The tensor plan's '{name}' is rowwise, and no layer of {width} output features is colwise before it; "
                "share that one as colwise, or this one as rowwise_split_input."
            )
    for name, width in kept.items():
        if width and not taken:
            raise ModelError(
                f"The tensor plan's '{name}' is colwise, and no rowwise layer takes its features; share it as "
                "colwise_gather_output, or the layer behind it as rowwise."
            )


def _kept_features(module: nn.Module, entry: Entry) -> int:
    """The output features of a linear layer that stay with their workers, of one of its matrices; 0: none do."""
    if "gather_output" in entry or not entry.keys() & {"colwise", "packed_colwise"}:
        return 0
    return int(module.out_features) // num_blocks(entry)  # type: ignore[arg-type]


def num_blocks(entry: Entry) -> int:
    """How many matrices lie above each other in a weight; packed_colwise without a number: two, as in gated layers."""
    return int((entry["packed_colwise"] or ("2",))[0]) if "packed_colwise" in entry else 1


def divided_attentions(modules: Mapping[str, nn.Module], plan: TensorPlan) -> list[str]:
    """The modules that know how wide a head is and whose own layers divide their heads, as those of transformers."""
    parents = {name.rpartition(".")[0] for name, entry in plan.entries.items() if "rowwise" in entry}
    return [name for name in parents if name in modules and isinstance(getattr(modules[name], "head_dim", None), int)]


_LENGTHS = {
    "colwise": "out_features",
    "packed_colwise": "out_features",
    "rowwise": "in_features",
    "embedding_rowwise": "num_embeddings",
    "channels": "out_channels",
}


def _check_length(
    name: str, modules: Mapping[str, nn.Module], style: str, arguments: tuple[str, ...], degree: int
) -> None:
    """Raises `ModelError` where a length cannot be divided, or an argument names nothing."""
    module: Any = modules[name]
    for attribute in {"heads": arguments, "attention": ("num_heads",)}.get(style, ()):
        if not isinstance(getattr(module, attribute, None), int):
            raise ModelError(f"The tensor plan's '{name}' has no whole number '{attribute}' that could be divided.")
        check_heads(name, getattr(module, attribute), degree)
    if style in ("same_input", "gather_channels") and (len(arguments) != 1 or arguments[0] not in modules):
        raise ModelError(f"The tensor plan's '{name}' has {style}({', '.join(arguments)}), which names no module.")
    if style not in _LENGTHS:
        return
    what, length = _LENGTHS[style], int(getattr(module, _LENGTHS[style]))
    fits = every_worker_has_some(length, degree)
    if style == "packed_colwise":
        blocks = num_blocks({style: arguments})
        fits, length = length % (blocks * degree) == 0, max(length // blocks, 1)
    elif style == "channels" and module.groups > 1:
        fits = module.groups % degree == 0 or (degree % module.groups == 0 and length % degree == 0)
        what, length = "groups", module.groups
    if not fits:
        raise ModelError(
            f"The tensor plan's '{name}' with {length} {what} cannot be shared as {style} by {degree} workers; use "
            f"{degrees_that_fit(length)}."
        )


def check_heads(name: str, num_heads: int, degree: int) -> None:
    """Raises `ModelError` where heads cannot be divided."""
    if num_heads % degree:
        raise ModelError(
            f"'{name}': {num_heads} heads cannot be shared by {degree} workers; use {degrees_that_fit(num_heads)}."
        )
