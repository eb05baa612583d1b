"""The models of a run, by name, as a checkpoint holds them.

Frozen models are not kept unless the script itself has changed their weights since `Run.prepare`, as it does with a
teacher that follows the model: it builds them again, and a fingerprint tells whether they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.errors import CheckpointError, ModelError
from paceline.parallel import Companion
from paceline.parallel.engine import AS_RANK
from paceline.train.records.digest import checksums, weights_sha256
from paceline.train.session.state import Trained
from paceline.words import on_one_line


@dataclass(frozen=True)
class FrozenModel:
    """A model that is called and not trained, as it was prepared."""

    model: nn.Module
    sha256: str
    """The fingerprint of its weights."""
    sums: list[float]
    """Their checksums."""

    @classmethod
    def of(cls, model: nn.Module) -> FrozenModel:
        weights = model.state_dict()
        return cls(model, weights_sha256(weights), checksums(weights))


class TrainedModels:
    """What a run has learned in all of its models."""

    def __init__(self) -> None:
        self.by_name: dict[str, Trained] = {}
        self.frozen: dict[str, FrozenModel | None] = {}
        """None where the run has no checkpoints."""
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
        if name in self.companions:
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
        self.frozen[name] = FrozenModel.of(companion.model) if is_saved else None
        self.companions[name] = companion

    def changed_frozen(self) -> dict[str, dict[str, Any]]:
        """The weights of the frozen models that the script has changed since they were prepared, by name."""
        states = {name: (one.model.state_dict(), one.sums) for name, one in self.frozen.items() if one is not None}
        return {name: state for name, (state, sums) in states.items() if checksums(state) != sums}

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
        """What `Trained.take` returns, of all models by name; and what there is of the frozen ones."""
        taken = {name: trained.take() for name, trained in self.by_name.items()}
        shared: dict[str, Any] = {"models": {name: one for name, (one, _) in taken.items()}}
        own: dict[str, Any] = {}
        for name, (_, of_model) in taken.items():
            for kind, state in of_model.items():
                if kind == AS_RANK:
                    own[kind] = state
                else:
                    own.setdefault(kind, {})[name] = state
        if self.frozen:
            digests = {name: None if one is None else one.sha256 for name, one in self.frozen.items()}
            shared |= {"frozen": digests, "changed_frozen": self.changed_frozen()}
        return shared, own

    def put(self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any], *, hyper: bool) -> None:
        """Give the model with this name its state, as `Trained.put` does.

        Raises:
            CheckpointError: the state is of another model or optimizer, or the checkpoint has no such model.
        """
        self.by_name[name].put(*_of_model(name, shared, own), hyper=hyper)

    def go_on(self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """After `put` of the same job's: as `Trained.go_on`, whose sentences it returns."""
        return self.by_name[name].go_on(*_of_model(name, shared, own))

    def own_shards(self, shared: dict[str, Any]) -> dict[str, Any]:
        """What `Trained.own_shards` returns, for the models that are known by now."""
        known = {name: one for name, one in shared["models"].items() if name in self.by_name}
        return shared | {"models": {name: self.by_name[name].own_shards(one) for name, one in known.items()}}

    def check_complete(self, shared: Mapping[str, Any]) -> None:
        """
        Raises:
            CheckpointError: the run that was saved had other models.
        """
        digests, changed = shared.get("frozen", {}), shared.get("changed_frozen", {})
        missing = [name for name in (*shared["models"], *digests) if name not in self.companions]
        if missing:
            raise CheckpointError(
                f"The checkpoint to resume has a model '{missing[0]}', which this run has not prepared; prepare the "
                "same models before the first batch, or begin in another folder."
            )
        for name, digest in digests.items():
            mine = self.frozen.get(name)
            if name not in changed and digest is not None and mine is not None and mine.sha256 != digest:
                raise CheckpointError(
                    f"The frozen model '{name}' does not have the weights that it had when this run was saved; "
                    "load the same ones, or begin in another folder."
                )

    def put_frozen(self, shared: Mapping[str, Any]) -> list[str]:
        """Give frozen models the weights that the script had given them; returns sentences that say so.

        Raises:
            CheckpointError: they are another model's.
        """
        said = []
        for name, state in shared.get("changed_frozen", {}).items():
            if name not in self.frozen:
                continue
            try:
                self.companions[name].model.load_state_dict(state)
            except RuntimeError as problem:
                why = on_one_line(str(problem))
                raise CheckpointError(f"The checkpoint's frozen model '{name}' is another one: {why}") from None
            said.append(
                f"The frozen model '{name}' has the weights that the script had given it when the run was saved."
            )
        return said

    def hyperparameters(self) -> Callable[[], None]:
        """A function that puts the optimizers' learning rates and the like back to what they are now."""
        groups = [group for trained in self.by_name.values() for group in trained.optimizer.param_groups]
        kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]

        def put_back() -> None:
            for group, values in zip(groups, kept, strict=True):
                group.update(values)

        return put_back


def _of_model(name: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `Trained.take` returned for the model with this name."""
    if name not in shared["models"]:
        raise CheckpointError(
            f"The checkpoint holds no model '{name}'; resume with the models that it was saved with, or begin in "
            "another folder."
        )
    return shared["models"][name], {kind: of_models[name] for kind, of_models in own.items() if name in of_models}
