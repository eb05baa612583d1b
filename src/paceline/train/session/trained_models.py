"""The models of a run, by name, as a checkpoint holds them.

The first is kept as the model of a run that has one only; the others beside it, under "models". Frozen models are not
kept unless the script itself has changed their weights since `Run.prepare`, as it does with a teacher that follows the
model: it builds them again, and a fingerprint tells whether they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paceline.errors import CheckpointError, ModelError
from paceline.parallel import Companion
from paceline.train.records.digest import checksums, weights_sha256
from paceline.train.session.state import Trained
from paceline.words import on_one_line

_OWN = ("sums", "means")


class TrainedModels:
    """What a run has learned in all of its models."""

    def __init__(self) -> None:
        self.by_name: dict[str, Trained] = {}
        self.frozen: dict[str, str | None] = {}
        """The fingerprint of the weights that each frozen model was prepared with; None where it is not needed."""
        self._checksums: dict[str, list[float]] = {}
        """The checksums of the weights that each frozen model was prepared with."""
        self.companions: dict[str, Companion] = {}
        """All models of the run, as loss functions call them."""

    @property
    def first(self) -> Trained:
        return next(iter(self.by_name.values()))

    def check_new(self, name: str, model: nn.Module) -> None:
        """
        Raises:
            ModelError: there is a model of this name, or another one holds the same parameters.
        """
        if name in self.by_name or name in self.frozen:
            raise ModelError(f"This run has a model called '{name}' already; call run.prepare with another name.")
        holders = {id(one): other for other, held in self.companions.items() for one in held.model.parameters()}
        for parameter_name, parameter in model.named_parameters():
            if id(parameter) in holders:
                raise ModelError(
                    f"The parameter '{parameter_name}' belongs to the model '{holders[id(parameter)]}' already, "
                    "and each model of a run needs parameters of its own; prepare the whole as one model, with a list "
                    "of optimizers."
                )

    def add(self, name: str, trained: Trained) -> None:
        self.by_name[name] = trained
        self.companions[name] = Companion(trained.model, trained.engine.buffers)

    def add_frozen(self, name: str, companion: Companion, *, is_saved: bool) -> None:
        """
        Args:
            is_saved: whether the run has checkpoints.
        """
        weights = companion.model.state_dict()
        self.frozen[name] = weights_sha256(weights) if is_saved else None
        if is_saved:
            self._checksums[name] = checksums(weights)
        self.companions[name] = companion

    def changed_frozen(self) -> dict[str, dict[str, Any]]:
        """The weights of the frozen models that the script has changed since they were prepared, by name."""
        states = {name: self.companions[name].model.state_dict() for name in self._checksums}
        return {name: state for name, state in states.items() if checksums(state) != self._checksums[name]}

    def of(self, model: nn.Module) -> Trained:
        """
        Raises:
            ModelError: it is none of those that are trained.
        """
        for trained in self.by_name.values():
            if trained.model is model:
                return trained
        raise ModelError("The model was not returned by run.prepare together with an optimizer; give one that was.")

    # --- checkpoints ---

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `Trained.take` returns, for all models."""
        shared, own = self.first.take()
        others = {name: trained.take() for name, trained in list(self.by_name.items())[1:]}
        if others:
            shared = shared | {"models": {name: taken for name, (taken, _) in others.items()}}
        for kind in _OWN:
            of_others = {name: taken[kind] for name, (_, taken) in others.items() if taken.get(kind)}
            if of_others:
                own = own | {kind: own.get(kind, {}) | {"models": of_others}}
        if self.frozen:
            shared = shared | {"frozen": dict(self.frozen), "changed_frozen": self.changed_frozen()}
        return shared, own

    def put(self, shared: Mapping[str, Any], own: Mapping[str, Any], *, hyper: bool) -> None:
        """Give all models their states, as `Trained.put` does for one."""
        for name in self.by_name:
            self.put_one(name, shared, own, hyper=hyper)

    def put_one(self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any], *, hyper: bool) -> None:
        """Give the model with this name its state, as `Trained.put` does.

        Raises:
            CheckpointError: the state is of another model or optimizer, or the checkpoint has no such model.
        """
        self.by_name[name].put(*self._states_of(name, shared, own), hyper=hyper)

    def _states_of(
        self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `Trained.take` returned for the model with this name."""
        if self.by_name[name] is self.first:
            mine = {kind: {key: one for key, one in own.get(kind, {}).items() if key != "models"} for kind in own}
            return dict(shared), mine
        kept = shared.get("models", {})
        if name not in kept:
            raise CheckpointError(
                f"The checkpoint holds no model '{name}'; resume with the models that it was saved with, or begin in "
                "another folder."
            )
        return kept[name], {kind: own[kind]["models"][name] for kind in own if name in own[kind].get("models", {})}

    def go_on(self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """After `put_one` of the same job's: as `Trained.go_on`, whose sentences it returns."""
        return self.by_name[name].go_on(*self._states_of(name, shared, own))

    def own_shards(self, shared: dict[str, Any]) -> dict[str, Any]:
        """What `Trained.own_shards` returns, for the models that are known by now."""
        kept = shared.get("models", {})
        mine = {name: self.by_name[name].own_shards(kept[name]) for name in kept if name in self.by_name}
        found = self.first.own_shards(shared)
        return found | ({"models": mine} if kept else {})

    def check_complete(self, shared: Mapping[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the run that was saved had other models.
        """
        missing = [name for name in (*shared["models"], *shared["frozen"]) if name not in {*self.by_name, *self.frozen}]
        if missing:
            raise CheckpointError(
                f"The checkpoint to resume has a model '{missing[0]}', which this run has not prepared; prepare the "
                "same models before the first batch, or begin in another folder."
            )
        for name, digest in shared["frozen"].items():
            is_kept = name in shared["changed_frozen"]
            if digest is not None and not is_kept and self.frozen.get(name) not in (None, digest):
                raise CheckpointError(
                    f"The frozen model '{name}' does not have the weights that it had when this run was saved; "
                    "load the same ones, or begin in another folder."
                )

    def put_frozen(self, changed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Give frozen models the weights that `changed_frozen` found; returns sentences that say so.

        Raises:
            CheckpointError: they are another model's.
        """
        known = {name: state for name, state in changed.items() if name in self.frozen}
        for name, state in known.items():
            try:
                self.companions[name].model.load_state_dict(state)
            except RuntimeError as problem:
                why = on_one_line(str(problem))
                raise CheckpointError(f"The checkpoint's frozen model '{name}' is another one: {why}") from None
        return [
            f"The frozen model '{name}' has the weights that the script had given it when the run was saved."
            for name in known
        ]

    def hyperparameters(self) -> Callable[[], None]:
        """A function that puts the optimizers' learning rates and the like back to what they are now."""
        optimizers = [trained.optimizer for trained in self.by_name.values()]
        kept = [
            [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]
            for one in optimizers
        ]

        def put_back() -> None:
            for one, groups in zip(optimizers, kept, strict=True):
                for group, values in zip(one.param_groups, groups, strict=False):
                    group.update(values)

        return put_back
