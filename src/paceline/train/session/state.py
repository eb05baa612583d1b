"""Model, optimizer and what belongs to them, taken out of a run for a checkpoint and put back.

What all workers have alike is `shared`. What each has for itself is `own`, sorted by what must stay the same when
other workers resume from it: the sum over all of them, or the mean. Numbers of which neither means anything, such as
counts, are each worker's where as many resume, else the first one's.

Not by torch.distributed.checkpoint.state_dict: its `get_optimizer_state_dict` makes a step with an optimizer that has
no state yet, which Adam's bias correction then counts, and its `set_optimizer_state_dict` refuses a parameter that
never had a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from paceline.checkpoint import Loaded, Stored
from paceline.dtensor_type import is_dtensor, local_shard, shard_slice
from paceline.errors import CheckpointError, ModelError, shown
from paceline.parallel import Engine
from paceline.parallel.dtensor import shard_like
from paceline.parallel.engine import AS_RANK
from paceline.train.optimizers.joint_optimizer import parts_of
from paceline.train.process.numerics import Precision
from paceline.train.session.wrapped_optimizers import (
    add_wrapped_state,
    attribute_tensors,
    holders,
    is_wrapped,
    load_wrapped_state,
    sharing_kept,
)
from paceline.words import and_more, on_one_line

_ALONE = "alone"
"""In a worker's own state: what another number of workers does not use."""
_NUM_NONFINITE = "nonfinite_in_a_row"


@dataclass
class NonFiniteSteps:
    """The consecutive steps without an update until now, because of losses or gradients that are not finite."""

    num_in_a_row: int = 0
    catch_up: Callable[[], None] = lambda: None
    """Counts the last step if the result of its check is still on the GPU, for which it waits."""


@dataclass(frozen=True)
class Trained:
    """What a run has learned, and what it learns with."""

    optimizer: Optimizer
    names: Names
    engine: Engine
    precision: Precision
    fresh_numbers: Mapping[str, float]
    """What `numbers_of` found before the first step."""
    nonfinite: NonFiniteSteps = field(default_factory=NonFiniteSteps)

    @property
    def model(self) -> nn.Module:
        """The model itself; on a worker that holds a stage, that stage."""
        return self.engine.module

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`shared` and `own` of this worker; their tensors are views of the live state."""
        optimizer = optimizer_state(self.optimizer, self.names, self.model)
        numbers = numbers_of(self.optimizer)
        if not self.engine.weights_diverge and self.engine.holds_all and (kept := attribute_tensors(self.optimizer)):
            optimizer["tensors"] = kept
        if moved := {name: one for name, one in numbers.items() if one != self.fresh_numbers.get(name)}:
            optimizer["numbers"] = moved
        own, scaler = self.engine.own_state(), self.precision.scaler.state_dict()
        self.nonfinite.catch_up()
        num_nonfinite = self.nonfinite.num_in_a_row
        if self.engine.weights_diverge:
            if AS_RANK not in own:
                means = own.get("means", {}) | {"optimizer": optimizer["state"]}
                alone = {"optimizer": optimizer | {"state": {}}, "scaler": scaler, _NUM_NONFINITE: num_nonfinite}
                own = {**own, "means": means, _ALONE: alone}
            optimizer = optimizer | {"state": {}}
        shared = {
            "model": self.engine.model_state(),
            "optimizer": optimizer,
            "engine": self.engine.shared_state(),
            "scaler": scaler,
            _NUM_NONFINITE: num_nonfinite,
            "requires_grad": {name: parameter.requires_grad for name, parameter in self.model.named_parameters()},
        }
        return shared, own

    def own_shards(self, shared: dict[str, Any]) -> dict[str, Any]:
        """This worker's shards of a checkpoint's `shared` that is not read yet.

        What does not fit is left whole or left out: `put` will say so.
        """
        parameters = dict(zip(self.names.held(self.optimizer, self.model), _parameters(self.optimizer), strict=True))
        model, optimizer = shared["model"], shared["optimizer"]
        mine = {name: _shard_of(model[name], value) for name, value in self.model.state_dict().items() if name in model}
        state = {
            name: {key: _shard_of(value, parameters[name]) for key, value in entries.items()}
            for name, entries in optimizer["state"].items()
            if name in parameters
        }
        return shared | {"model": mine, "optimizer": optimizer | {"state": state}}

    def put(self, shared: dict[str, Any], own: dict[str, Any], *, hyper: bool) -> None:
        """Go back to what `take` returned; to its learning rates and the like too if `hyper` is set.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        try:
            load_model_state(self.model, shared["model"], holds_all=self.engine.holds_all)
        except RuntimeError as problem:
            raise CheckpointError(f"The checkpoint belongs to another model: {on_one_line(str(problem))}") from None
        alone = {"optimizer": shared["optimizer"], "scaler": shared["scaler"]} | own.get(_ALONE, {})
        optimizer, means = alone["optimizer"], own.get("means", {})
        if "optimizer" in means:  # workers' weights differed
            optimizer = optimizer | {"state": means["optimizer"]}
        load_optimizer_state(self.optimizer, self.names, self.model, optimizer, hyper=hyper)
        kept = optimizer.get("tensors", {})
        for place, tensor in attribute_tensors(self.optimizer).items() if kept else ():
            if place in kept and kept[place].shape == tensor.shape:
                tensor.detach().copy_(kept[place])
        set_numbers(self.optimizer, {**self.fresh_numbers, **optimizer.get("numbers", {})})  # others had not moved
        self.engine.load_state(shared["engine"], own)
        self.precision.scaler.load_state_dict(alone["scaler"])

    def count_on(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Count steps that are not finite from where `take` was called, which going back by `put` does not."""
        kept = shared | own.get(_ALONE, {})
        self.nonfinite.num_in_a_row = int(kept.get(_NUM_NONFINITE, 0))  # earlier versions kept none

    def freeze_as(self, shared: Mapping[str, Any]) -> list[str]:
        """Freeze and unfreeze parameters as they were when `take` was called; returns sentences that say so."""
        kept, said = shared.get("requires_grad", {}), []
        for word, is_trained in (("frozen", False), ("trained", True)):
            others = {
                name: parameter
                for name, parameter in self.model.named_parameters()
                if kept.get(name) is is_trained is not parameter.requires_grad
            }
            for parameter in others.values():
                parameter.requires_grad_(is_trained)
            if others:
                more = and_more(len(others) - 1)
                said.append(
                    f"As when the run was saved, '{next(iter(others))}'{more} is {word}; to choose otherwise, set "
                    "requires_grad after run.prepare."
                )
        return said


@dataclass(frozen=True)
class Names:
    """What the parameters of an optimizer are called in the whole model."""

    groups: tuple[tuple[str, ...], ...]
    """The names of the parameters of each group, in the group's order."""
    first: Mapping[str, str]
    """The name that counts of a parameter, by each of its names: a tied one has several, and the first counts."""

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> Self:
        """Raises `ModelError` where the optimizer holds parameters that are not the model's."""
        firsts: dict[int, str] = {}
        named = model.named_parameters(remove_duplicate=False)
        first = {name: firsts.setdefault(id(parameter), name) for name, parameter in named}
        held = [[firsts.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
        if any(name is None for names in held for name in names):
            raise ModelError(
                "The optimizer holds parameters that are not the model's; build it from model.parameters(), of which "
                "those of a criterion have to be part before run.prepare."
            )
        return cls(tuple(tuple(name for name in names if name is not None) for names in held), first)

    def groups_now(self, optimizer: Optimizer, model: nn.Module) -> Sequence[tuple[str, ...]]:
        """`groups`, and those that a script has added since.

        Raises:
            ModelError: an added group has parameters that are not the model's, or workers hold parts of the model.
        """
        if len(optimizer.param_groups) == len(self.groups):
            return self.groups
        known = {id(parameter): self.first[name] for name, parameter in model.named_parameters()}
        if len(known) < len(set(self.first.values())):
            raise ModelError(
                "Groups were added to the optimizer after run.prepare, and workers that hold parts of the model cannot "
                "save them; give it all groups before, and freeze with requires_grad_(False) what is to train later."
            )
        return Names.of(optimizer, model).groups

    def held(self, optimizer: Optimizer, model: nn.Module) -> list[str]:
        """The names of the parameters that the optimizer has on this worker, by their numbers in its state."""
        known = {id(parameter): self.first[name] for name, parameter in model.named_parameters()}
        return [known[id(parameter)] for parameter in _parameters(optimizer)]


def rebind(optimizer: Optimizer, names: Names, model: nn.Module) -> None:
    """Let the optimizer update what this worker now holds of its parameters, in the same groups.

    Raises:
        ModelError: it has made steps already, which belong to the parameters as they were.
    """
    mine = {names.first[name]: parameter for name, parameter in model.named_parameters()}
    held = [[mine[name] for name in group if name in mine] for group in names.groups]
    before = [id(parameter) for parameter in _parameters(optimizer)]
    fresh = [part for part in parts_of(optimizer) if _is_fresh_adagrad(part)]
    for part in fresh:
        part.state.clear()
    if before != [id(parameter) for group in held for parameter in group]:
        if optimizer.state:
            raise ModelError("The optimizer has been used before run.prepare; give it a new one, or the strategy dp.")
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters
    for part in fresh:
        for group in part.param_groups:
            for parameter in group["params"]:
                # As its constructor does, the only one of torch's that makes state at once.
                total = torch.full_like(parameter, group["initial_accumulator_value"], requires_grad=False)
                part.state[parameter] |= {"step": torch.tensor(0.0), "sum": total}


def _is_fresh_adagrad(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, Adagrad) and not any(float(state["step"]) for state in optimizer.state.values())


def _plain_state(optimizer: Optimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class whose `state_dict` and `load_state_dict` keep its state by the numbers of parameters, and that state:
    torch's class, where its own has another form, as that of a Lookahead around another optimizer."""
    own = optimizer.state_dict()
    if {"state", "param_groups"} <= own.keys():
        return type(optimizer), own
    return Optimizer, Optimizer.state_dict(optimizer)


def optimizer_state(optimizer: Optimizer, names: Names, model: nn.Module) -> dict[str, Any]:
    """Its state and its groups, with the names of parameters in place of their numbers."""
    held = names.held(optimizer, model)
    _, plain = _plain_state(optimizer)
    names_now = names.groups_now(optimizer, model)
    groups = [group | {"params": list(own)} for group, own in zip(plain["param_groups"], names_now, strict=True)]
    state = {held[number]: entries for number, entries in plain["state"].items()}
    add_wrapped_state(optimizer, dict(zip(map(id, _parameters(optimizer)), held, strict=True)), state)
    return {"state": state, "groups": groups}


def numbers_of(optimizer: Optimizer) -> dict[str, float]:
    """The numbers that an optimizer, and one that it wraps, keep in attributes, which no `state_dict` has: a count of
    steps for instance."""
    return {
        f"{number}/{name}": float(value) if isinstance(value, Tensor) else value
        for number, holder in enumerate(holders(optimizer))
        for name, value in vars(holder).items()
        if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def set_numbers(optimizer: Optimizer, numbers: Mapping[str, float]) -> None:
    """Give attributes the values that `numbers_of` found."""
    for number, holder in enumerate(holders(optimizer)):
        for name, value in vars(holder).items():
            if (kept := numbers.get(f"{number}/{name}")) is not None:
                if isinstance(value, Tensor):
                    value.detach().fill_(kept)
                else:
                    vars(holder)[name] = kept


_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of `param_groups` that are not loaded from a checkpoint: those that select kernels, since the device may differ,
and the parameters themselves."""


def load_optimizer_state(
    optimizer: Optimizer, names: Names, model: nn.Module, state: Mapping[str, Any], *, hyper: bool
) -> None:
    """Put it back, of what this worker holds; learning rates and the like too if `hyper` is set.

    Raises:
        CheckpointError: it belongs to other parameters.
    """
    if [tuple(group["params"]) for group in state["groups"]] != list(names.groups):
        raise CheckpointError(
            "The checkpoint's optimizer has different parameters or parameter groups from this run's; resume with the "
            "same model and optimizer (groups that were added during the run are given to it before run.prepare), or "
            "begin in another folder."
        )
    numbers = {name: number for number, name in enumerate(names.held(optimizer, model))}
    kind, fresh = _plain_state(optimizer)
    parameters = _parameters(optimizer)
    groups = []
    for own, kept in zip(fresh["param_groups"], state["groups"], strict=True):
        _check_alike(own, kept)
        groups.append((own | kept if hyper else own) | {key: own[key] for key in _OF_THIS_RUN if key in own})
    by_number = {
        numbers[name]: {key: _state_like(parameters[numbers[name]], value) for key, value in entries.items()}
        for name, entries in state["state"].items()
        if name in numbers
    }
    own_state = {
        number: own
        for number, entries in by_number.items()
        if (own := {key: value for key, value in entries.items() if not is_wrapped(key)})
    }
    with sharing_kept(optimizer):
        kind.load_state_dict(optimizer, {"state": own_state, "param_groups": groups})
    load_wrapped_state(optimizer, {parameters[number]: entries for number, entries in by_number.items()})


def _check_alike(own: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Check the settings of an optimizer's group, such as its learning rate. Raises `CheckpointError`."""
    for key in own.keys() & kept.keys() - {"params"}:
        mine, theirs = own[key], kept[key]
        alike = (_is_number(mine) and _is_number(theirs)) or isinstance(theirs, type(mine)) or None in (mine, theirs)
        if not alike or (isinstance(theirs, float) and not math.isfinite(theirs)):
            raise CheckpointError(f"The checkpoint's optimizer has {key} = {shown(theirs)}, which it cannot have.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load_model_state(model: nn.Module, state: Mapping[str, Any], *, holds_all: bool) -> None:
    """Give the model what it holds of a whole one's state. Raises RuntimeError for another model's."""
    if holds_all:
        model.load_state_dict(state)
        return
    mine = model.state_dict()
    missing = [name for name in mine if name not in state]
    if missing:
        raise RuntimeError(f"it lacks '{missing[0]}'")
    for name, value in mine.items():
        kept = state[name]
        if isinstance(kept, Loaded):
            local_shard(value).copy_(kept.values)
        elif isinstance(value, Tensor):
            if value.shape != kept.shape:
                raise RuntimeError(f"'{name}' has the shape {tuple(kept.shape)}, not {tuple(value.shape)}")
            local_shard(value).copy_(local_shard(shard_like(kept, value)))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shard_of(stored: Any, like: Any) -> Any:
    """The shard that this worker needs of a stored tensor: where it holds a shard of `like`, the same of it."""
    is_spread = isinstance(stored, Stored) and is_dtensor(like) and stored.shape == tuple(like.shape)
    return stored.slice_at(*shard_slice(like)) if is_spread else stored


def _state_like(parameter: Tensor, value: Any) -> Any:
    """This worker's shard of a tensor of the parameter's shape, in the memory layout an optimizer would have made."""
    if isinstance(value, Loaded):
        found = torch.empty_like(parameter, dtype=value.values.dtype)
        local_shard(found).copy_(value.values)
        return found
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        shard = shard_like(value.to(parameter.device), parameter)
        return torch.empty_like(parameter, dtype=value.dtype).copy_(shard)
    return value
