"""The reference models, one family a file, and `build`, which makes any model from its `ModelSpec`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from paceline.errors import JobError, ModelError, did_you_mean
from paceline.import_path import import_by_path
from paceline.models.efficientnet import VARIANTS, efficientnet
from paceline.models.gpt import GPT
from paceline.models.lenet import lenet, mlp
from paceline.models.resnet import resnet18, resnet20, resnet50
from paceline.spec.codec import PositiveInt, UnitInterval, from_mapping
from paceline.spec.job import ModelSpec

__all__ = ["MODELS", "build"]

MODELS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet50": resnet50,
    **{name: partial(efficientnet, name) for name in VARIANTS},
    "gpt": GPT,
}
"""Name -> constructor. Its whole-number parameters are counts (at least 1), its floats probabilities."""
_BOUNDED: Final[Mapping[Any, Any]] = {
    int: PositiveInt,
    float: UnitInterval,
    float | None: UnitInterval | None,
}


def build(spec: ModelSpec | str, **data_facts: Any) -> nn.Module:
    """The model that `spec` names, with freshly drawn weights from torch's global generator. Raises `ModelError` where
    there is no such model, or it has no such option, or the options are invalid. What a user's own constructor raises
    passes through untouched.

    Args:
        spec: a name in `MODELS`, or an import path "package.module:build" of any callable that returns a
            module, and the keyword arguments for it; or just the name.
        data_facts: what the data set knows, such as num_classes, in_channels, image_size, or vocab_size and
            context. A constructor receives those that it has as parameters; `spec.options` win over them,
            and a fact that is None is unknown.
    """
    spec = ModelSpec(spec) if isinstance(spec, str) else spec
    build_model = constructor(spec.name)
    model = build_model(**_arguments(build_model, spec, data_facts))
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.name = '{spec.name}' should return a torch.nn.Module, not a {type(model).__name__}.")
    return model


def constructor(name: str) -> Callable[..., Any]:
    """The function that builds the model of a name or an import path. Raises `ModelError` if there is none."""
    if ":" in name:
        return import_by_path(name, "model.name", ModelError)
    if name not in MODELS:
        raise ModelError(
            f"There is no model {name!r}: {did_you_mean(name.lower(), MODELS)}The models are {', '.join(MODELS)}, "
            "or any import path 'package.module:build'."
        )
    return MODELS[name]


def _arguments(constructor: Callable[..., Any], spec: ModelSpec, data_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `constructor`: the facts it asks for, then the options, held to its signature."""
    ours = spec.name in MODELS
    parameters = inspect.signature(constructor, eval_str=ours).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    names = {one.name for one in named}
    given = {name: value for name, value in data_facts.items() if name in names and value is not None} | spec.options
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return given
    # Options are checked like any table of a job, against a dataclass read off the signature, without its defaults.
    fields: list[Any] = []
    for one in named:
        kind = _BOUNDED.get(one.annotation, one.annotation) if ours else Any
        fields.append((one.name, kind) if one.default is one.empty else (one.name, kind, None))
    try:
        checked: object = from_mapping(make_dataclass("Options", fields, kw_only=True), given, "model.options")
    except JobError as problem:
        raise ModelError(f"The model '{spec.name}' cannot be built: {problem}") from None
    return {name: getattr(checked, name) for name in given}
