"""An optimizer's state, taken out for a checkpoint by the names of parameters, and put back.

Read from and written to `Optimizer.state` and `Optimizer.param_groups` themselves. A `state_dict` numbers parameters,
which are others on another mesh, and those of wrappers leave out what the optimizer inside of them has. Not by
torch.distributed.checkpoint.state_dict either: its `get_optimizer_state_dict` makes a step with an optimizer that has
no state yet, which Adam's bias correction then counts, and its `set_optimizer_state_dict` refuses a parameter that
never had a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from paceline.checkpoint.load import Loaded
from paceline.containers import to_device
from paceline.dtensor_type import local_shard
from paceline.errors import CheckpointError, ModelError
from paceline.parallel.dtensor import shard_like
from paceline.train.optim import parts_of

_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of `param_groups` that are not loaded from a checkpoint: those that select kernels, since the device may differ,
and the parameters themselves."""


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
        """`groups`, and those that a script has added since."""
        name_of = self.of_parameters(model)
        added = optimizer.param_groups[len(self.groups) :]
        return *self.groups, *(tuple(name_of[id(parameter)] for parameter in group["params"]) for group in added)

    def of_parameters(self, model: nn.Module) -> dict[int, str]:
        """The names of the parameters that this worker holds, by their ids."""
        return {id(parameter): self.first[name] for name, parameter in model.named_parameters()}


def rebind(optimizer: Optimizer, names: Names, model: nn.Module) -> None:
    """Let the optimizer update what this worker now holds of its parameters, in the same groups. Raises `ModelError`
    where it has made steps already, which belong to the parameters as they were."""
    mine = {names.first[name]: parameter for name, parameter in model.named_parameters()}
    held = [[mine[name] for name in group if name in mine] for group in names.groups]
    before = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    fresh = [
        part
        for part in parts_of(optimizer)
        if isinstance(part, Adagrad) and not any(float(state["step"]) for state in part.state.values())
    ]
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


def optimizers_in(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The parts of an optimizer, and those that these have in attributes, as SAM has the one that makes its updates;
    each with the prefix of its keys in a checkpoint."""
    inner = []
    for part in parts_of(optimizer):
        yield "", part
        inner += [one for one in vars(part).values() if isinstance(one, Optimizer) and one.state is not part.state]
    for number, one in enumerate(inner):
        yield f"{number}/", one


def optimizer_state(optimizer: Optimizer, names: Names, model: nn.Module) -> dict[str, Any]:
    """Its "state" by the names of parameters, its "groups", and the "numbers" that it keeps in attributes."""
    name_of = names.of_parameters(model)
    state: dict[str, dict[str, Any]] = {}
    for prefix, one in optimizers_in(optimizer):
        for parameter, entries in one.state.items():
            kept = state.setdefault(name_of[id(parameter)], {})
            kept |= {f"{prefix}{key}": value for key, value in entries.items()}
    groups = zip(optimizer.param_groups, names.groups_now(optimizer, model), strict=True)
    return {
        "state": state,
        "groups": [group | {"params": list(own)} for group, own in groups],
        # What optimizers keep in attributes, such as a count of steps.
        "numbers": {
            f"{number}/{name}": float(value) if isinstance(value, Tensor) else value
            for number, (_, one) in enumerate(optimizers_in(optimizer))
            for name, value in vars(one).items()
            if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
        },
    }


def load_optimizer_state(
    optimizer: Optimizer, names: Names, model: nn.Module, saved: Mapping[str, Any], *, hyper: bool
) -> None:
    """Put back what this worker holds of `optimizer_state`; learning rates and the like too if `hyper` is set. Raises
    `CheckpointError` where it belongs to other parameters."""
    if [tuple(group["params"]) for group in saved["groups"]] != list(names.groups):
        raise CheckpointError(
            "The checkpoint's optimizer has different parameters or parameter groups from this run's; resume with the "
            "same model and optimizer (groups that were added during the run are given to it before run.prepare), or "
            "begin in another folder."
        )
    for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
        if hyper:
            group.update({key: value for key, value in kept.items() if key not in _OF_THIS_RUN})
    name_of = names.of_parameters(model)
    prefixes = [prefix for prefix, _ in optimizers_in(optimizer) if prefix]
    for prefix, one in optimizers_in(optimizer):
        others = () if prefix else tuple(prefixes)
        one.state.clear()
        for group in one.param_groups:
            is_on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                mine = {
                    key.removeprefix(prefix): _like(parameter, key.removeprefix(prefix), value, is_on_device)
                    for key, value in saved["state"].get(name_of[id(parameter)], {}).items()
                    if key.startswith(prefix) and not key.startswith(others)
                }
                if mine:
                    one.state[parameter] = mine
    for number, (_, one) in enumerate(optimizers_in(optimizer)):
        for name, value in vars(one).items():
            number_kept = saved.get("numbers", {}).get(f"{number}/{name}")
            if number_kept is not None and isinstance(value, Tensor):
                value.detach().fill_(number_kept)
            elif number_kept is not None:
                vars(one)[name] = number_kept


def _like(parameter: Tensor, key: str, value: Any, is_on_device: bool) -> Any:
    """A value of a parameter's state where the optimizer would have it: this worker's shard of a tensor of the
    parameter's shape, in the same memory layout; a count of steps in host memory, unless kernels count it."""
    if key == "step" and not isinstance(value, Loaded):
        return to_device(value, parameter.device if is_on_device else torch.device("cpu"))
    if isinstance(value, Loaded):
        found = torch.empty_like(parameter, dtype=value.values.dtype)
        local_shard(found).copy_(value.values)
        return found
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        shard = shard_like(value.to(parameter.device), parameter)
        return torch.empty_like(parameter, dtype=value.dtype).copy_(shard)
    return to_device(value, parameter.device)
