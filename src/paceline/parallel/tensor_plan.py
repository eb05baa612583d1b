"""Tensor parallelism by a declared plan: torch's `parallelize_module`, and what it leaves to its caller.

A tensor plan maps names of modules to styles, in the words of transformers' `tp_plan`: {"blocks.*.up": "colwise",
"blocks.*.down": "rowwise"}. The user gives it, or the model declares it as its attribute `_tp_plan`. A colwise layer
leaves its output features divided among the workers of the axis, and a rowwise layer takes them so and sums: between
the two lies a divided region (Shoeybi et al. 2019, "Megatron-LM", section 3). Torch divides the layers. This module
checks the plan, keeps tied weights tied, and lets dropout inside of divided regions draw as one device does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError, did_you_mean

TensorPlan = dict[str, str]
"""The style of each divided module, by its name in the model."""

_DIVISIONS: dict[str, tuple[str, Callable[[], ParallelStyle]]] = {
    "colwise": ("out_features", ColwiseParallel),
    "colwise_gather_output": ("out_features", partial(ColwiseParallel, output_layouts=Replicate())),
    "rowwise": ("in_features", RowwiseParallel),
    "rowwise_split_input": ("in_features", partial(RowwiseParallel, input_layouts=Replicate())),
    "embedding_rowwise": ("num_embeddings", partial(RowwiseParallel, input_layouts=Replicate())),
}
"""What each style divides of a layer, and torch's style for it; docs/strategies.md has what that means."""
_STYLES = (*_DIVISIONS, "heads(num_heads, ...)", "replicate")
_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise"}
"""Names that transformers 4 has for them."""


def tensor_plan_of(model: nn.Module, given: Mapping[str, str] | None, degree: int) -> TensorPlan:
    """The plan by which `degree` workers divide the layers of a whole model. Raises `ModelError` where there is no
    plan, or it does not fit the model and the degree. `given`: the user's; * stands for one part of a name. None: the
    model's own, its attribute `_tp_plan`."""
    declared = dict(getattr(model, "_tp_plan", None) or {}) if given is None else given
    modules = dict(model.named_modules())
    plan: TensorPlan = {}
    for pattern, style in declared.items():
        expression = re.escape(pattern).replace(r"\*", r"[^.]+")
        found = [name for name in modules if re.fullmatch(expression, name)]
        if not found and given is not None:
            hint = did_you_mean(pattern, modules, "{}") or "write the name as model.named_modules() has it."
            raise ModelError(f"The tensor plan names '{pattern}', which this model does not have: {hint}")
        plan |= dict.fromkeys(found, _ALIASES.get(style, style))
    if not plan:
        raise ModelError(
            f"The axis tp divides layers by a tensor plan, and {type(model).__name__} declares none; give one, such as "
            'run.prepare(..., tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}), or use another '
            "strategy."
        )
    plan = {name: style for name, style in plan.items() if style != "replicate"}
    for name, style in plan.items():
        _check_module(name, modules, style, degree)
    _check_tied(model, plan)
    return plan


def _check_module(name: str, modules: Mapping[str, nn.Module], style: str, degree: int) -> None:
    """Raises `ModelError` where `degree` workers cannot divide the module in this style."""
    module = modules[name]
    lengths = {attribute: getattr(module, attribute, None) for attribute in _counts(style)}
    if not lengths:
        if style not in _DIVISIONS:
            hint = did_you_mean(style, [*_STYLES, *_ALIASES])
            raise ModelError(
                f"The tensor plan has no style '{style}', as it is given for '{name}': {hint}The styles are "
                f"{', '.join(_STYLES)}; give run.prepare a tensor_plan of these, or use another strategy."
            )
        kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
        if type(module) is not kind:
            raise ModelError(
                f"The tensor plan's '{name}' is a {type(module).__name__}, and '{style}' is for {kind.__name__}; give "
                "it another style, or none."
            )
        feature, _ = _DIVISIONS[style]
        lengths = {feature: getattr(module, feature)}
        head_dim = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
        if style == "colwise" and isinstance(head_dim, int):
            lengths["heads"] = cast(nn.Linear, module).out_features // head_dim
    # What is gathered or looked up need not divide evenly; but every worker needs some of it.
    is_even = style not in ("colwise_gather_output", "embedding_rowwise")
    for what, length in lengths.items():
        if length is None or (length % degree if is_even else length < degree**2):
            raise ModelError(
                f"The tensor plan's '{name}' has {what} = {length}, which {degree} workers cannot divide as {style}; "
                "use a tp degree that divides it."
            )


def _counts(style: str) -> list[str]:
    """The attributes of "heads(num_heads, width)"."""
    found = re.fullmatch(r"heads\(([\w\s,]+)\)", style)
    return [] if found is None else [one.strip() for one in found[1].split(",")]


def _check_tied(model: nn.Module, plan: TensorPlan) -> None:
    """Raises `ModelError` if the plan divides one place of a tied weight and not the others."""
    for places in _places_of_tied(model):
        features = (_DIVISIONS.get(plan.get(place.rpartition(".")[0], ""), ("",))[0] for place in places)
        if len({feature and feature == "in_features" for feature in features}) > 1:
            raise ModelError(
                f"'{places[1]}' is the same weight as '{places[0]}', and the tensor plan divides only one of them, or "
                "each in another way; give both a style by rows (embedding_rowwise, colwise_gather_output), or none."
            )


def apply_tensor_plan(model: nn.Module, axis: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Let the workers of `axis`, of one dimension, share the layers of `model` by a plan of `tensor_plan_of`.

    What goes into the model and comes out of it stays plain and whole on every worker. Parameters of divided layers
    become DTensors; all others stay as they are and get the true gradient, the same on every worker. All workers have
    the same weights before, or weights on the meta device. Nothing is sent.
    """
    places = _places_of_tied(model)
    for name, style in plan.items():
        module = model.get_submodule(name)
        for attribute in _counts(style):
            setattr(module, attribute, getattr(module, attribute) // axis.size())
    styles = {name: _DIVISIONS[style][1]() for name, style in plan.items() if style in _DIVISIONS}
    parallelize_module(model, axis, styles, src_data_rank=None)
    for first, *others in places:  # one object again, as before they were divided
        for other in others:
            owner, _, key = other.rpartition(".")
            setattr(model.get_submodule(owner), key, model.get_parameter(first))
    for name, style in plan.items():
        if style == "embedding_rowwise":
            # Torch gives an embedding's whole gradient to every worker; a norm would count it once for each.
            weight = cast(DTensor, model.get_parameter(f"{name}.weight"))
            if weight.requires_grad:
                weight.register_hook(lambda grad, like=weight: grad.redistribute(placements=like.placements))
    _DividedRegion(axis).watch(model, plan)


def _places_of_tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    return [names for names in places.values() if len(names) > 1]


class _DividedRegion(TorchFunctionMode):
    """The part of a forward pass in which every worker has its own features or heads of the activations.

    It begins behind a colwise layer and ends before the rowwise layer that takes its features; hooks of these layers
    enter and leave it, so that it is there when activations are computed a second time, too. Inside, dropout draws
    the mask of all features or heads, as one device does, and uses the worker's own part of it.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__()
        self._axis = axis
        self._widths: set[int] = set()
        """The worker's own output features of the colwise layers since the region began; empty: outside."""
        self._has_heads = False

    def watch(self, model: nn.Module, plan: Mapping[str, str]) -> None:
        """Register the hooks."""
        modules = dict(model.named_modules())
        for name, module in modules.items():
            style = plan.get(name)
            if style == "colwise":
                parent = name.rpartition(".")[0]
                has_heads = hasattr(modules[parent], "head_dim") or bool(_counts(plan.get(parent, "")))
                module.register_forward_hook(partial(self._begin, has_heads))
            elif style == "rowwise":
                module.register_forward_pre_hook(lambda _module, _arguments: self._end())
            elif style is None and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(self._refuse_whole, name))
        model.register_forward_pre_hook(lambda _module, _arguments: self._end())  # an error may have left it open
        model.register_forward_hook(self._refuse_open)

    def _begin(self, has_heads: bool, _module: nn.Module, _arguments: Any, output: Tensor) -> None:
        if not self._widths:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._widths.add(output.shape[-1])
        self._has_heads |= has_heads

    def _end(self) -> None:
        if self._widths:
            self._widths.clear()
            self._has_heads = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _refuse_whole(self, name: str, _module: nn.Module, _arguments: Any) -> None:
        if self._widths:
            raise ModelError(
                f"'{name}' has parameters that are whole on every worker, and is called between a colwise layer and "
                "the rowwise one behind it, where each worker knows a part of their gradient; make the layer before "
                "it colwise_gather_output and the one behind it rowwise_split_input."
            )

    def _refuse_open(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        if self._widths:
            self._end()
            raise ModelError(
                "The tensor plan has a colwise layer whose features no rowwise layer takes: the model would return a "
                "part of them; make it colwise_gather_output."
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return F.dropout(input, p, training, inplace)
        dim = 1 if self._has_heads and input.dim() == 4 else input.dim() - 1
        if dim > 1 and input.shape[-1] not in self._widths:
            raise ModelError(
                f"Dropout on a tensor of shape {tuple(input.shape)}, between a colwise layer and the rowwise one "
                "behind it: it is not known which dimension workers divide; leave these layers out of the tensor plan."
            )
        # Random numbers are drawn in the order of memory, which is that of the input.
        order = sorted(range(input.dim()), key=input.stride().__getitem__, reverse=True)
        shape = [input.shape[one] * (self._axis.size() if one == dim else 1) for one in order]
        mask = F.dropout(input.new_ones(shape), p).permute(sorted(range(input.dim()), key=order.__getitem__))
        # A copy: a view would keep the whole mask for backward.
        return input * mask.chunk(self._axis.size(), dim)[self._axis.get_local_rank()].clone()

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Where weights are dropped it is computed as the documentation of torch's function has it."""
        if dropout_p == 0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
        return self._dropout(torch.softmax(scores, -1), dropout_p) @ value
