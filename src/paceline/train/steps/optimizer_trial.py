"""Whether an optimizer updates what a worker of a mesh holds of a model as it would update the whole model.

Known of torch's optimizers that go number by number. Any other is tried before training: a copy of it makes a few steps
on small parameters that are divided as the model's are, and another copy on the same parameters, whole. They differ
where a norm or another number of all parameters enters the update and a stage of a pipeline has some of them only, or
where the optimizer reads numbers of a shard as if it were the parameter.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.data.generators import global_generators_kept
from paceline.dtensor_type import local_shard
from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.dtensor import shard_like
from paceline.parallel.random_numbers.generators import generator_states
from paceline.spec import Mesh
from paceline.train.optimizers.closures import must_have_closure
from paceline.train.optimizers.joint_optimizer import parts_of
from paceline.train.optimizers.optim import BY_ELEMENT
from paceline.train.process.process_group import World
from paceline.train.session.state import Names

_NUM_STEPS = 6
_MIN_LR = 0.05
_LOW = (torch.bfloat16, torch.float16)
_TOLERANCE = 1e-3
"""A fraction of the largest update of a parameter; the iterations of Muon amplify rounding in float32 to 1e-4."""


@dataclass(frozen=True)
class Shape:
    """What a trial takes over of a parameter."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: Tensor, mesh: Mesh) -> Shape:
        """A small one for `parameter`: no dimension is larger than shards of two rows for all workers."""
        most = max(8, 2 * mesh.fsdp * mesh.tp)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return cls(tuple(min(size, most) for size in parameter.shape), wide)


def check_updates_of_parts(
    optimizer: Optimizer, names: Names, shapes: Mapping[str, Shape], model: nn.Module, mesh: Mesh, world: World
) -> None:
    """Raise `ModelError`, on all workers, for an optimizer whose update depends on how the model is divided.

    A collective of all workers of a mesh, each of which holds `model`, a part of the whole one.

    Args:
        optimizer: of the parameters in `model`.
        names, shapes: of the parameters of the whole model.
    """
    held = {names.first[name]: parameter for name, parameter in model.named_parameters()}
    groups = iter(names.groups)
    for one in parts_of(optimizer):
        of_one = [next(groups) for _ in one.param_groups]
        if type(one) in BY_ELEMENT or must_have_closure(one):
            continue
        tried = _tried(of_one, shapes, held, world)
        devices = [world.device] if world.device.type == "cuda" else []
        with global_generators_kept(), torch.random.fork_rng(devices):
            problem = _problem(one, tried, shapes, held, world.device)
        for found in all_gather_objects(problem, world.group):
            if found:
                raise ModelError(
                    f"{type(one).__name__} cannot update a model under the strategy {mesh}: {found}; choose an "
                    "optimizer that updates every number by its own gradient, as AdamW does, or the strategy dp."
                )


def _tried(
    groups: Sequence[Sequence[str]], shapes: Mapping[str, Shape], held: Mapping[str, Tensor], world: World
) -> list[list[str]]:
    """The parameters of each group to try: the first of those that are alike and held by the same workers."""
    holders = all_gather_objects(sorted(held), world.group)
    seen = set()
    tried: list[list[str]] = []
    for number, group in enumerate(groups):
        tried.append([])
        for name in group:
            kind = number, shapes[name], tuple(name in names for names in map(set, holders))
            if kind not in seen:
                seen.add(kind)
                tried[-1].append(name)
    return tried


def _problem(
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    shapes: Mapping[str, Shape],
    held: Mapping[str, Tensor],
    device: torch.device,
) -> str:
    """What is wrong with the update of what this worker holds; empty: nothing. A collective."""
    before = generator_states(device)
    names = [name for group in groups for name in group]
    try:
        whole = {name: _small(shapes[name], number, device) for number, name in enumerate(names)}
        expected = _updates(_copied(optimizer), groups, whole)
    except Exception as problem:
        return f"a trial on small parameters ended in {_words(problem)}"
    if before != generator_states(device):
        return ""  # the first step says that it draws random numbers
    own_groups = [[name for name in group if name in held] for group in groups]
    try:
        own = {name: [shard_like(one, held[name]) for one in whole[name]] for name in names if name in held}
        found = _updates(_copied(optimizer), own_groups, own)
    except Exception as problem:
        return f"with shards of parameters it ends in {_words(problem)}"
    for name, update in found.items():
        right = expected[name]
        rounding = 8 * torch.finfo(right.dtype).eps * whole[name][0].abs().max()
        apart = (local_shard(update) - local_shard(shard_like(right, held[name]))).abs()
        if not bool((apart <= _TOLERANCE * right.abs().max() + rounding).all()):
            return (
                f"the update of '{name}' depends on what other workers hold, as where a norm of several gradients "
                "enters (for clipping, the job's optim.clip_norm takes that of all)"
            )
    return ""


def _small(shape: Shape, number: int, device: torch.device) -> list[Tensor]:
    """A parameter's values, then its gradient in each step.

    Norms differ from shard to shard and from parameter to parameter, and so does how long a gradient keeps its sign.
    """
    draws = torch.Generator().manual_seed(number)
    scale = torch.tensor(1.0 + number, dtype=shape.dtype)
    for dim, size in enumerate(shape.sizes):
        along = [size if one == dim else 1 for one in range(len(shape.sizes))]
        scale = scale * torch.linspace(1, 4, size, dtype=shape.dtype).view(along)
    values, gradient = (torch.randn(shape.sizes, generator=draws, dtype=shape.dtype) * scale for _ in range(2))
    steadiness, *moods = torch.rand(1 + _NUM_STEPS, generator=draws).tolist()
    gradients = [10 * gradient if mood < steadiness else -10 * gradient for mood in moods]
    return [one.to(device) for one in (0.01 * values, *gradients)]


@torch.no_grad()
def _updates(
    optimizer: Optimizer, groups: Sequence[Sequence[str]], tensors: Mapping[str, Sequence[Tensor]]
) -> dict[str, Tensor]:
    """By how much the parameters are changed in all steps, where `optimizer` is given their values and gradients."""
    parameters = {name: nn.Parameter(values.clone()) for name, (values, *_) in tensors.items()}
    for own, names in zip(optimizer.param_groups, groups, strict=True):
        own["params"] = [parameters[name] for name in names]
        if "param_names" in own:
            own["param_names"] = list(names)
        if isinstance(own.get("lr"), float | int):
            own["lr"] = max(own["lr"], _MIN_LR)  # a warm-up may begin with 0
    if hasattr(optimizer, "train"):  # as schedule-free ones have, which refuse to step in evaluation mode
        optimizer.train()
    with _FullPrecision():
        for step in range(_NUM_STEPS):
            for name, (_, *gradients) in tensors.items():
                parameters[name].grad = gradients[step].clone()
            type(optimizer).step(optimizer)  # schedulers put one into the optimizer itself, bound to the original
    return {name: parameter.detach() - tensors[name][0] for name, parameter in parameters.items()}


class _FullPrecision(TorchFunctionMode):
    """Computes in float32 what would be computed in fewer bits, as torch's Muon does: rounding would hide errors."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called = Tensor.float if func in (Tensor.bfloat16, Tensor.half) else func
        args = tuple(_wide(one) for one in args)
        return called(*args, **{key: _wide(one) for key, one in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _LOW else value


def _copied(optimizer: Optimizer, memo: dict[int, Any] | None = None) -> Optimizer:
    """A copy without state, parameters and hooks, of optimizers that it has in it as well.

    `copy.deepcopy` would leave out what the classes made from Optimizer keep.
    """
    memo = {} if memo is None else memo
    memo |= {id(parameter): None for group in optimizer.param_groups for parameter in group["params"]}
    memo[id(optimizer)] = copied = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            vars(copied)[key] = _copied(value, memo)
        elif key == "state":
            memo[id(value)] = vars(copied)[key] = defaultdict(dict)
        elif key.endswith("_hooks"):
            vars(copied)[key] = OrderedDict()
        elif key != "step":
            vars(copied)[key] = copy.deepcopy(value, memo)
    return copied


def _words(problem: Exception) -> str:
    """The type of an error and its first line."""
    first_line, _, _ = str(problem).strip().partition("\n")
    return f"{type(problem).__name__} ({first_line or 'no message'})"
