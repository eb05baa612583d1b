"""Model, optimizer and what belongs to them, taken out of a run for a checkpoint and put back.

What all workers have alike is `shared`. What each has for itself is `own`, sorted by what must stay the same when
other workers resume from it: the sum over all of them, or the mean. Numbers of which neither means anything, such as
counts, are each worker's where as many resume, else the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint import Loaded, Stored
from paceline.dtensor_type import is_dtensor, local_shard, shard_slice
from paceline.errors import CheckpointError
from paceline.parallel import Engine
from paceline.parallel.dtensor import shard_like
from paceline.parallel.engine import AS_RANK
from paceline.train.process.numerics import Precision
from paceline.train.session.optimizer_state import Names, load_optimizer_state, optimizer_state
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
    nonfinite: NonFiniteSteps = field(default_factory=NonFiniteSteps)

    @property
    def model(self) -> nn.Module:
        """The model itself; on a worker that holds a stage, that stage."""
        return self.engine.module

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`shared` and `own` of this worker; their tensors are views of the live state."""
        optimizer = optimizer_state(self.optimizer, self.names, self.model)
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
        name_of = self.names.of_parameters(self.model)
        parameters = {name_of[id(parameter)]: parameter for parameter in self.model.parameters()}
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
        self.engine.load_state(shared["engine"], own)
        self.precision.scaler.load_state_dict(alone["scaler"])

    def go_on(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Count steps that are not finite from where `take` was called, and freeze and unfreeze parameters as they were
        then; returns sentences about these. Not where a run goes back by `put` alone."""
        self.nonfinite.num_in_a_row = int((shared | own.get(_ALONE, {})).get(_NUM_NONFINITE, 0))
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


def _shard_of(stored: Any, like: Any) -> Any:
    """The shard that this worker needs of a stored tensor: where it holds a shard of `like`, the same of it."""
    is_spread = isinstance(stored, Stored) and is_dtensor(like) and stored.shape == tuple(like.shape)
    return stored.slice_at(*shard_slice(like)) if is_spread else stored
