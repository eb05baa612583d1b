"""The stages of a model as modules, and what scripts are given in place of the model, of which no worker has all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.model_graph import Cut


class Stage(nn.Module):
    """Consecutive blocks of a model, and the parameters that operations between them use, under their names in it."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self._functions: dict[Hashable, Callable[..., list[Tensor]]] = {}
        """What the stage computes, for each form of the model's arguments."""
        for name in sorted(names, key=lambda name: name.count(".")):
            self.attach(model, name)

    def attach(self, model: nn.Module, name: str) -> None:
        """Hold a module, parameter or buffer of the model."""
        *path, last = name.split(".")
        owner: nn.Module = self
        original = model
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
        else:
            owner.register_buffer(last, value, persistent=last not in original._non_persistent_buffers_set)

    def add(self, form: Hashable, cut: Cut) -> None:
        """Take what the stage computes for a form of the model's arguments.

        Raises:
            ModelError: another stage has what it would need.
        """
        for name in cut.used:
            try:
                operator.attrgetter(name)(self)
            except AttributeError:
                raise ModelError(
                    f"A call of the model uses '{name}' in another stage than in training, or in evaluation alone; cut "
                    "the model elsewhere (pipeline.cuts), or choose another strategy."
                ) from None
        self._functions[form] = cut.function

    def forward(self, form: Hashable, *given: Tensor) -> list[Tensor]:
        return self._functions[form](self, *given)


def stages_of(model: nn.Module, used: Sequence[Sequence[str]]) -> list[Stage]:
    """The stages; the first one holds what no stage uses, too."""
    stages = [Stage(model, names) for names in used]
    held = {name for stage in stages for name in _tensor_names(stage)}
    for name in _tensor_names(model):
        if name not in held:
            stages[0].attach(model, name)
    return stages


def _tensor_names(model: nn.Module) -> list[str]:
    """All names of parameters and buffers."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors]


def free_other_layers(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Free the parameters of `model` that are in none of this worker's stages: they become scalars, expanded to their
    shapes."""
    own = {module for stage in stages for module in stage.modules()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and module not in own:
                nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(nothing, requires_grad=False)


def _in_parts(what: str) -> ModelError:
    return ModelError(
        f"The loss function uses {what}, of which a worker of a pipeline has a part: call the model itself (an L2 "
        "penalty is the optimizer's weight_decay), or choose another strategy."
    )


class StandIn(nn.Module):
    """What a loss function is given in place of the model."""

    def __init__(
        self, skeleton: nn.Module, training: bool, answer: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        """
        Args:
            skeleton: has the attributes of the model, such as its configuration.
            answer: called with the arguments of the model.
        """
        super().__init__()
        self.training = training
        self._skeleton = (skeleton,)
        self._answer = answer
        self._was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._was_called:
            raise ModelError(
                "The loss function calls the model twice; in a pipeline it can do so once: put both halves into one "
                "batch, or choose another strategy."
            )
        self._was_called = True
        return self._answer(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_skeleton"][0], name)
            if callable(value) or isinstance(value, Tensor):
                raise _in_parts(f"model.{name}") from None
            return value

    # What would look for layers and parameters would find none, and a penalty on them be 0.

    def named_modules(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _in_parts("the model's modules or parameters")

    def named_children(self) -> NoReturn:
        raise _in_parts("the model's modules")

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _in_parts("model.state_dict()")

    def __getitem__(self, index: Any) -> NoReturn:
        raise _in_parts(f"model[{index!r}]")

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        return self


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
