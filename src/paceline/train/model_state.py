"""The models of a run with their optimizers and what belongs to them, taken out for a checkpoint and put back.

Frozen models are not kept unless the script itself has changed their weights since `Run.prepare`, as it does with a
teacher that follows the model: it builds them again, and a fingerprint tells whether they are the same.

What all workers have alike is `shared`. What each has for itself is `own`, sorted by what must stay the same when
other workers resume from it: the sum over all of them, or the mean. Numbers of which neither means anything, such as
counts, are each worker's where as many resume, else the first one's.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.format import Slice
from paceline.checkpoint.load import Loaded, Stored
from paceline.errors import CheckpointError, ModelError
from paceline.parallel import Buffers, Engine
from paceline.parallel.dtensor import shard_like
from paceline.parallel.losses import Loss
from paceline.spec import Job
from paceline.tensors import is_dtensor, local_shard, shard_slice, to_device
from paceline.train.optim import LearningRates, parts_of
from paceline.words import and_more

LossFn = Callable[[nn.Module, Any], Loss]
"""The loss of a batch, from the prepared model and the batch: the mean over its samples, or a `Mean`."""

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """A job's precision on this worker's device."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._kind = device.type
        self._dtype = _AUTOCAST.get(job.precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "float16")
        """Scales the loss, so that small gradients do not become zero in float16; does nothing in other precisions."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward passes (autocast)."""
        return nullcontext() if self._dtype is None else torch.autocast(self._kind, dtype=self._dtype)

    def of(self, loss_fn: LossFn) -> LossFn:
        """The same loss function, computing in this precision."""

        def loss_of(model: nn.Module, batch: Any) -> Loss:
            with self.autocast():
                return loss_fn(model, batch)

        return loss_of


_ALONE = "alone"
"""The entry of a worker's own state that another number of workers does not use."""
_NUM_NONFINITE = "nonfinite_in_a_row"


@dataclass(eq=False)
class Trained:
    """What a run has learned, and what it learns with."""

    optimizer: Optimizer
    names: ParameterNames
    engine: Engine
    precision: Precision
    rates: LearningRates
    schedulers: tuple[Any, ...] = ()
    """Learning-rate schedulers, moved after each update."""
    needs_closure: bool = False
    """Whether the optimizer computes the gradient several times in a step."""
    num_nonfinite: int = 0
    """The consecutive steps without an update until now, because of losses or gradients that are not finite."""
    catch_up: Callable[[], None] = lambda: None
    """Counts the last step if the result of its check is still on the GPU, for which it waits."""

    @property
    def model(self) -> nn.Module:
        """The model itself; on a worker that holds a stage, that stage."""
        return self.engine.module

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`shared` and `own` of this worker; their tensors are views of the live state."""
        optimizer = optimizer_state(self.optimizer, self.names, self.model)
        own, scaler = self.engine.own_state(), self.precision.scaler.state_dict()
        self.catch_up()
        if self.engine.weights_diverge:
            means = own.get("means", {}) | {"optimizer": optimizer["state"]}
            alone = {"optimizer": optimizer | {"state": {}}, "scaler": scaler, _NUM_NONFINITE: self.num_nonfinite}
            own = {**own, "means": means, _ALONE: alone}
            optimizer = optimizer | {"state": {}}
        shared = {
            "model": self.engine.model_state(),
            "optimizer": optimizer,
            "engine": self.engine.shared_state(),
            "scaler": scaler,
            _NUM_NONFINITE: self.num_nonfinite,
            "requires_grad": {name: parameter.requires_grad for name, parameter in self.model.named_parameters()},
        }
        return shared, own

    def own_shards(self, shared: dict[str, Any]) -> dict[str, Any]:
        """This worker's shards of a checkpoint's `shared` that is not read yet; `put` will say what does not fit."""
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
        """Go back to what `take` returned; to its learning rates and the like too if `hyper` is set. Raises
        `CheckpointError` where it is of another model or optimizer."""
        load_model_state(self.model, shared["model"], holds_all=self.engine.holds_all)
        alone = {"optimizer": shared["optimizer"], "scaler": shared["scaler"]} | own.get(_ALONE, {})
        optimizer, means = alone["optimizer"], own.get("means", {})
        if "optimizer" in means:  # workers' weights differed
            optimizer = optimizer | {"state": means["optimizer"]}
        load_optimizer_state(self.optimizer, self.names, self.model, optimizer, hyper=hyper)
        self.engine.load_state(shared["engine"], own)
        if alone["scaler"]:  # else it was saved in another precision
            self.precision.scaler.load_state_dict(alone["scaler"])

    def go_on(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
        """Count steps that are not finite from where `take` was called, and freeze and unfreeze parameters as they were
        then; returns sentences about these. Not where a run goes back by `put` alone."""
        self.num_nonfinite = int((shared | own.get(_ALONE, {})).get(_NUM_NONFINITE, 0))
        kept = shared["requires_grad"]
        others = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if kept.get(name, parameter.requires_grad) is not parameter.requires_grad
        }
        for parameter in others.values():
            parameter.requires_grad_(not parameter.requires_grad)
        more = and_more(len(others) - 1)
        return _other_dtypes(self.model, shared["model"]) + [
            f"As when the run was saved, '{name}'{more} is {'trained' if parameter.requires_grad else 'frozen'}; to "
            "choose otherwise, set requires_grad after run.prepare."
            for name, parameter in list(others.items())[:1]
        ]

    def hyperparameters(self) -> Callable[[], None]:
        """A function that puts the optimizer's learning rates and the like back to what they are now."""
        groups = [*self.optimizer.param_groups]
        kept = [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]

        def put_back() -> None:
            for group, values in zip(groups, kept, strict=True):
                group.update(values)

        return put_back


def _other_dtypes(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """A sentence where parameters were saved with another dtype than they have, which rounds or widens them."""
    saved = {name: one.values if isinstance(one, Loaded) else one for name, one in state.items()}
    others = [
        f"The checkpoint has '{name}' as {saved[name].dtype}, and the model as {parameter.dtype}: it was converted."
        for name, parameter in model.named_parameters()
        if isinstance(saved.get(name), Tensor) and saved[name].dtype != parameter.dtype
    ]
    return others[:1]


def load_model_state(model: nn.Module, state: Mapping[str, Any], *, holds_all: bool) -> None:
    """Give the model what it holds of a whole one's state. Raises `CheckpointError` for another model's."""
    try:
        if holds_all:
            model.load_state_dict(state)
            return
        modules: dict[str, Any] = dict(model.named_modules())
        for name, value in model.state_dict().items():
            if name not in state:
                raise RuntimeError(f"it lacks '{name}'")
            kept = state[name]
            if isinstance(kept, Loaded):
                local_shard(value).copy_(kept.values)
            elif isinstance(value, Tensor):
                if value.shape != kept.shape:
                    raise RuntimeError(f"'{name}' has the shape {tuple(kept.shape)}, not {tuple(value.shape)}")
                local_shard(value).copy_(local_shard(shard_like(kept, value)))
            else:
                modules[name.rpartition(".")[0]].set_extra_state(kept)
    except RuntimeError as problem:
        raise CheckpointError(f"The checkpoint belongs to another model: {' '.join(str(problem).split())}") from None


def _shard_of(stored: Any, like: Any) -> Any:
    """The shard that this worker needs of a stored tensor: where it holds a shard of `like`, the same of it."""
    is_spread = isinstance(stored, Stored) and is_dtensor(like) and stored.shape == tuple(like.shape)
    return replace(stored, slice=Slice(*shard_slice(like))) if is_spread else stored


class TrainedModels:
    """What a run has learned in all of its models."""

    def __init__(self) -> None:
        self.by_name: dict[str, Trained] = {}
        self.frozen: dict[str, list[float] | None] = {}
        """The checksums of the weights that each frozen model was prepared with; None where the run has no
        checkpoints."""
        self.companions: dict[str, Buffers] = {}
        """All models of the run, as loss functions call them."""

    @property
    def first(self) -> Trained:
        return next(iter(self.by_name.values()))

    def check_new(self, name: str, model: nn.Module) -> None:
        """Raises `ModelError` for no model, a name that another one has, or parameters that another one holds."""
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"The first argument of run.prepare should be a torch.nn.Module, not {type(model).__name__}; the "
                "optimizer comes second."
            )
        if name in self.companions:
            raise ModelError(f"This run has a model called '{name}' already; call run.prepare with another name.")
        holders = {id(one): other for other, held in self.companions.items() for one in held.model.parameters()}
        for parameter_name, parameter in model.named_parameters():
            if id(parameter) in holders:
                raise ModelError(
                    f"The parameter '{parameter_name}' belongs to the model '{holders[id(parameter)]}' already; "
                    "prepare both as one model, with a list of optimizers."
                )

    def add(self, name: str, trained: Trained) -> None:
        self.by_name[name] = trained
        self.companions[name] = trained.engine.buffers

    def add_frozen(self, name: str, companion: Buffers, *, is_saved: bool) -> None:
        """Add one; with `is_saved` the run has checkpoints, and looks for changes of its weights."""
        self.frozen[name] = checksums(companion.model.state_dict()) if is_saved else None
        self.companions[name] = companion

    def changed_frozen(self) -> dict[str, dict[str, Any]]:
        """The weights of the frozen models that the script has changed since they were prepared, by name."""
        states = {
            name: self.companions[name].model.state_dict() for name, sums in self.frozen.items() if sums is not None
        }
        return {name: state for name, state in states.items() if checksums(state) != self.frozen[name]}

    def of(self, model: nn.Module) -> Trained:
        """Raises `ModelError` where it is none of those that are trained."""
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
                own.setdefault(kind, {})[name] = state
        if self.frozen:
            shared |= {"frozen": dict(self.frozen), "changed_frozen": self.changed_frozen()}
        return shared, own

    def put(
        self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any], *, hyper: bool, goes_on: bool = False
    ) -> list[str]:
        """Give the model with this name its state, as `Trained.put` does; where the run goes on from it, returns what
        `Trained.go_on` says. Raises `CheckpointError` where the state is of another model or optimizer, or the
        checkpoint has no such model."""
        if name not in shared["models"]:
            raise CheckpointError(f"The checkpoint holds no model '{name}'; resume with the same models.")
        of_model = shared["models"][name], {kind: one[name] for kind, one in own.items() if name in one}
        self.by_name[name].put(*of_model, hyper=hyper)
        return self.by_name[name].go_on(*of_model) if goes_on else []

    def own_shards(self, shared: dict[str, Any]) -> dict[str, Any]:
        """What `Trained.own_shards` returns, for the models that are known by now."""
        known = {name: one for name, one in shared["models"].items() if name in self.by_name}
        return shared | {"models": {name: self.by_name[name].own_shards(one) for name, one in known.items()}}

    def check_complete(self, shared: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` where the run that was saved had other models."""
        frozen, changed = shared.get("frozen", {}), shared.get("changed_frozen", {})
        missing = [name for name in (*shared["models"], *frozen) if name not in self.companions]
        if missing:
            raise CheckpointError(
                f"The checkpoint to resume has a model '{missing[0]}', which this run has not prepared; prepare the "
                "same models before the first batch, or begin in another folder."
            )
        for name, sums in frozen.items():
            mine = self.frozen.get(name)
            if name in changed or mine is None or sums is None:
                continue
            # Devices round otherwise.
            if len(mine) != len(sums) or not all(map(partial(math.isclose, rel_tol=1e-5, abs_tol=1e-30), mine, sums)):
                raise CheckpointError(
                    f"The frozen model '{name}' has other weights than when this run was saved; load the same ones."
                )

    def put_frozen(self, shared: Mapping[str, Any]) -> list[str]:
        """Give frozen models the weights that the script had given them; returns sentences that say so. Raises
        `CheckpointError` where they are another model's."""
        said = []
        for name, state in shared.get("changed_frozen", {}).items():
            if name not in self.frozen:
                continue
            load_model_state(self.companions[name].model, state, holds_all=True)
            said.append(
                f"The frozen model '{name}' has the weights that the script had given it when the run was saved."
            )
        return said


# --- fingerprints of weights ---


def weights_sha256(state: Mapping[str, Any]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a model's state_dict, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def checksums(state: Mapping[Any, Any]) -> list[float]:
    """Numbers that move with the values in a model's state_dict, by passes over its tensors that make no copies."""
    found = [_checksum(tensor.detach()) for tensor in state.values() if isinstance(tensor, Tensor) and tensor.numel()]
    return torch.stack(found).nan_to_num().tolist() if found else []


def _checksum(tensor: Tensor) -> Tensor:
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not numbers.is_floating_point() or numbers.dtype.itemsize == 1:  # float8 has no arithmetic
        numbers = numbers.double()
    largest, total = (torch.linalg.vector_norm(numbers, order, dtype=torch.float64) for order in (2, 1))
    found: Tensor = largest + total + numbers.sum(dtype=torch.float64) / 2
    return found


# --- an optimizer's state, by the names of parameters ---


_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of `param_groups` that are not loaded from a checkpoint: those that select kernels, since the device may differ,
and the parameters themselves."""


@dataclass(frozen=True)
class ParameterNames:
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

    def of_parameters(self, model: nn.Module) -> dict[int, str]:
        """The names of the parameters that this worker holds, by their ids."""
        return {id(parameter): self.first[name] for name, parameter in model.named_parameters() if name in self.first}


def rebind(optimizer: Optimizer, names: ParameterNames, model: nn.Module) -> None:
    """Let the optimizer update what this worker now holds of its parameters, in the same groups. Raises `ModelError`
    where it has state already, which belongs to the parameters as they were."""
    mine = {names.first[name]: parameter for name, parameter in model.named_parameters()}
    held = [[mine[name] for name in group if name in mine] for group in names.groups]
    before = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if before != [id(parameter) for group in held for parameter in group]:
        if optimizer.state:
            raise ModelError(
                "The optimizer has state of whole parameters before run.prepare (one that was used, or Adagrad); give "
                "another one, or choose the strategy dp."
            )
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters
    for part in parts_of(optimizer):
        if part.state:
            finest = {parameter: dict(entries) for parameter, entries in part.state.items()}
            part.load_state_dict(part.state_dict())  # on the device and in the type that the parameters have by now
            for parameter, entries in finest.items():
                for key, value in entries.items():
                    is_moment = key != "step" and isinstance(value, Tensor) and value.is_floating_point()
                    if is_moment and value.dtype.itemsize > parameter.dtype.itemsize:
                        part.state[parameter][key] = value.to(parameter.device)  # in its own, finer type


def optimizers_in(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The parts of an optimizer, and those that these have in attributes, as SAM has the one that makes its updates;
    each with the prefix of its keys in a checkpoint."""
    inner = []
    for part in parts_of(optimizer):
        yield "", part
        inner += [one for one in vars(part).values() if isinstance(one, Optimizer) and one.state is not part.state]
    for number, one in enumerate(inner):
        yield f"{number}/", one


def kind_of(optimizer: Optimizer) -> str:
    """The names of the classes of an optimizer's parts."""
    return ", ".join(type(part).__name__ for part in parts_of(optimizer))


def optimizer_state(optimizer: Optimizer, names: ParameterNames, model: nn.Module) -> dict[str, Any]:
    """Its "state" by the names of parameters, its "groups", and the "numbers" that it keeps in attributes. Raises
    `ModelError` where a group that was added to it holds parameters that are not the model's."""
    name_of = names.of_parameters(model)
    if any(id(parameter) not in name_of for group in optimizer.param_groups for parameter in group["params"]):
        raise ModelError(
            "The optimizer holds parameters that the model does not have as run.prepare returned it; leave these out."
        )
    added = optimizer.param_groups[len(names.groups) :]  # by the script, since it was prepared
    state: dict[str, dict[str, Any]] = {}
    for prefix, one in optimizers_in(optimizer):
        for parameter, entries in one.state.items():
            kept = state.setdefault(name_of[id(parameter)], {})
            kept |= {f"{prefix}{key}": value for key, value in entries.items()}
    own_names = [*names.groups, *([name_of[id(parameter)] for parameter in group["params"]] for group in added)]
    return {
        "kind": kind_of(optimizer),
        "state": state,
        "groups": [group | {"params": list(own)} for group, own in zip(optimizer.param_groups, own_names, strict=True)],
        # What optimizers keep in attributes, such as a count of steps.
        "numbers": {
            f"{number}/{name}": float(value) if isinstance(value, Tensor) else value
            for number, (_, one) in enumerate(optimizers_in(optimizer))
            for name, value in vars(one).items()
            if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
        },
    }


def load_optimizer_state(
    optimizer: Optimizer, names: ParameterNames, model: nn.Module, saved: Mapping[str, Any], *, hyper: bool
) -> None:
    """Put back what this worker holds of `optimizer_state`; learning rates and the like too if `hyper` is set. Of
    another kind of optimizer nothing is put back. Raises `CheckpointError` where it belongs to other parameters."""
    if [tuple(group["params"]) for group in saved["groups"]] != list(names.groups):
        raise CheckpointError(
            "The checkpoint's optimizer has other parameters or groups than this run's; resume with the same ones "
            "(groups that were added during the run are given to it before run.prepare), or begin in another folder."
        )
    if saved.get("kind", kind_of(optimizer)) != kind_of(optimizer):
        saved, hyper = {**saved, "state": {}, "numbers": {}}, False
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
