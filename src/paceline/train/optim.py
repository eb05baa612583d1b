"""Optimizers and learning rates: the optimizer and the scheduler that a job names, several optimizers over one model as
one, and the job's own schedule, a pure function of how many samples have been seen."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import JobError, ModelError, did_you_mean, shown
from paceline.import_path import import_by_path
from paceline.parallel import Engine
from paceline.spec import Job, Mesh
from paceline.spec.job import OptimSpec, SchedulerSpec
from paceline.tensors import is_dtensor

_TOTALS = ("total_steps", "num_training_steps")
"""Names of the scheduler options for the number of steps of the whole run."""
_FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
FUSED = (*_FUSED_ON_SHARDS, torch.optim.SGD)
"""Optimizers that torch has fused kernels for; subclasses are not included. The kernels look at
`found_inf`."""
BY_ELEMENT = (
    *FUSED,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers whose update of an element depends on that element's gradient alone; subclasses are not included."""


def build_optimizer(optim: OptimSpec, model: nn.Module) -> Optimizer:
    """The optimizer of a job over all trainable parameters of `model`. Raises `JobError` where there is no such
    optimizer, or it has no such option, or a pattern fits no parameter."""
    kind = optimizer_class(optim.name)
    given = {"lr": optim.lr} | ({"momentum": optim.momentum} if getattr(kind, "__name__", "") == "SGD" else {})
    if optim.weight_decay or has_parameter(kind, "weight_decay"):
        given["weight_decay"] = optim.weight_decay
    given |= optim.options
    options = checked_options(kind, given, f"the optimizer {optim.name!r}", "optim.options", num_given=1)
    groups = parameter_groups(optim, model)
    for group in groups:
        others = {key: value for key, value in group.items() if key != "params"}
        checked_options(kind, others, optim.name, "optim.groups", num_given=1)
    is_one = len(groups) == 1 and len(groups[0]) == 1
    try:
        made = kind(groups[0]["params"] if is_one else groups, **options)
    except ValueError as problem:
        raise JobError(f"The optimizer {optim.name!r} refuses its options in optim: {problem}.") from problem
    if not isinstance(made, Optimizer):
        raise JobError(f"optim.name = {optim.name!r} should make a torch.optim.Optimizer, not a {type(made).__name__}.")
    return made


def parameter_groups(optim: OptimSpec, model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters in groups of equal options, in the model's order. Raises `JobError` for a pattern that
    fits no trainable parameter."""
    found: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    unused = set(optim.groups)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        options: dict[str, Any] = {}
        if not optim.decay_norms_and_biases and parameter.dim() < 2:
            options["weight_decay"] = 0.0
        pattern = next((one for one in optim.groups if fnmatch.fnmatchcase(name, one)), None)
        if pattern is not None:
            unused.discard(pattern)
            options |= optim.groups[pattern]
        key = tuple(sorted((option, repr(value)) for option, value in options.items()))
        group = found.setdefault(key, {"params": [], **options})
        group["params"].append(parameter)
    if unused:
        raise JobError(
            f"optim.groups: the pattern {sorted(unused)[0]!r} fits no trainable parameter; the model's first ones are "
            f"{', '.join(name for name, _ in list(model.named_parameters())[:3])}."
        )
    return list(found.values())


def choose_kernels(optimizer: Optimizer, device: torch.device, *, alike_on_shards: bool = False) -> None:
    """Have an optimizer update by as few kernels as its parameters allow, where its user has chosen nothing.

    On a GPU torch takes all parameters of a group together, which fails where some are shards and others whole,
    whatever its user chose, or shards along other axes; and it takes its fused kernels only where it is told to. On a
    CPU it goes one by one, Adam with a dozen calls for each: there the fused kernels take over what they are right for.
    With `alike_on_shards` whole parameters are updated by the kernels that shards are, which give the same bits.
    """
    for part, group in ((one, group) for one in parts_of(optimizer) for group in one.param_groups):
        parameters = group["params"]
        kinds = {one.device_mesh if is_dtensor(one) else None for one in parameters}
        if None in kinds and len(kinds) > 1:
            group.update({way: False for way in ("foreach", "fused") if way in group})
        if group.get("foreach", False) is not None or group.get("fused") is not None:
            continue
        are_floating = all(one.device.type == device.type and one.is_floating_point() for one in parameters)
        if device.type == "cpu":
            # There they round the last elements of a tensor in another way, values of 16 bits once in an update and
            # not at each operation, as shards are, and do not look at strides. For SGD they gain nothing.
            is_plain = all(one.is_contiguous() and one.itemsize > 2 for one in parameters)
            is_right = kinds == {None} and not alike_on_shards and is_plain
            if is_right and are_floating and type(part) in _FUSED_ON_SHARDS and not group["differentiable"]:
                group["fused"] = True
            continue
        is_fused = type(part) in (FUSED if kinds == {None} and not alike_on_shards else _FUSED_ON_SHARDS)
        if len(kinds) > 1:
            group["foreach"] = False
        elif is_fused and are_floating:
            group["fused"] = True


def check_updates_by_element(optimizer: Optimizer, mesh: Mesh, device: torch.device) -> None:
    """Raise `JobError` for an optimizer that may give a shard other bits than that slice of a whole parameter."""
    for group in optimizer.param_groups:
        # On a CPU fused kernels round the last elements of a tensor in another way; on a GPU parameters without
        # dimensions are updated by other kernels than shards.
        is_cpu = device.type == "cpu"
        is_alike = not group.get("fused") if is_cpu else all(parameter.dim() for parameter in group["params"])
        if not is_alike or any(type(one) not in BY_ELEMENT for one in parts_of(optimizer)):
            raise JobError(
                f"parity = 'bitwise' with {mesh} needs an optimizer that gives every element of a shard the bits that "
                f"it has in a whole parameter: one of {', '.join(kind.__name__ for kind in BY_ELEMENT)}, not fused on "
                "a CPU, and on a GPU without parameters that have no dimension; choose so, or the strategy dp."
            )


def build_scheduler(spec: SchedulerSpec, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The scheduler of a job, which will be moved `total_steps` times in the whole run."""
    assert spec.name is not None  # there is one
    make = import_by_path(spec.name, "optim.scheduler.name")
    options = dict(spec.options)
    for name in _TOTALS:
        if has_parameter(make, name):
            options.setdefault(name, total_steps)
    options = checked_options(make, options, f"the scheduler {spec.name!r}", "optim.scheduler.options", num_given=1)
    scheduler: LRScheduler = make(optimizer, **options)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError("optim.scheduler: ReduceLROnPlateau needs a metric; write a callback, or a script of your own.")
    return scheduler


def ends_with_epochs(job: Job) -> bool:
    """Whether the learning rates of a job depend on how many epochs it has."""
    spec = job.optim.scheduler
    if spec.name is None:
        return job.optim.schedule in ("cosine", "linear")
    make = import_by_path(spec.name, "optim.scheduler.name")
    return any(has_parameter(make, name) and name not in spec.options for name in _TOTALS)


def optimizer_class(name: str) -> Callable[..., Any]:
    """The optimizer of a name or an import path. Raises `JobError` if there is none."""
    if ":" in name:
        return import_by_path(name, "optim.name")
    known = {
        one.__name__.lower(): one
        for one in vars(torch.optim).values()
        if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer
    }
    if name.lower() not in known:
        raise JobError(
            f"There is no optimizer {name!r}: {did_you_mean(name.lower(), known)}torch.optim has "
            f"{', '.join(sorted(known))}; others are named by an import path 'package.module:Optimizer'."
        )
    return known[name.lower()]


# --- several optimizers as one, and closures ---


class JointOptimizer(Optimizer):
    """Optimizers of distinct parameters that make their updates together; each keeps its own state and groups."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises `ModelError` where there is none, or two hold the same parameter."""
        self.optimizers = tuple(optimizers) if isinstance(optimizers, list | tuple) else ()
        if not self.optimizers or not all(isinstance(one, Optimizer) for one in self.optimizers):
            raise ModelError(f"run.prepare was given {shown(optimizers)} as optimizer; give one, a list, or None.")
        held = [id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            raise ModelError("Two of the optimizers hold the same parameter; give every parameter to one of them.")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that a model's optimizer consists of: itself, unless it joins several."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def needs_closure(optimizer: Optimizer, engine: Engine, job: Job) -> bool:
    """Whether `optimizer.step` has a parameter `closure` without a default, as that of LBFGS: it computes the gradient
    several times in a step. Raises `JobError` where this run cannot compute a step's gradient again."""
    closures = [inspect.signature(type(one).step).parameters.get("closure") for one in parts_of(optimizer)]
    if not any(closure is not None and closure.default is inspect.Parameter.empty for closure in closures):
        return False
    is_alone = engine.holds_all and job.aggregation.method == "every_step" and not isinstance(optimizer, JointOptimizer)
    is_strided = job.channels_last and isinstance(optimizer, torch.optim.LBFGS)  # which views gradients as vectors
    if not is_alone or job.precision == "float16" or is_strided:
        raise JobError(
            "An optimizer that computes the gradient several times in a step has to be its model's only one, and needs "
            "the strategy dp, aggregation.method = 'every_step' and a precision other than 'float16', LBFGS also "
            "channels_last = false; choose these or another optimizer."
        )
    return True


# --- learning rates ---


class LearningRates:
    """An optimizer's learning rates: the job's schedule times its base rates, which are those it has now."""

    def __init__(self, job: Job, optimizer: Optimizer) -> None:
        """Raises `ModelError` where the optimizer has no learning rates that the job's schedule could change."""
        self._job, self._scale = job, job.lr_scale
        self._optimizer = optimizer
        self._known: list[list[float | None]] = [[] for _ in parts_of(optimizer)]
        """The base rates of each optimizer's groups. None: it finds its rate itself, as Adafactor of transformers does
        with relative_step."""
        self._is_scheduled = counts_epochs(job) or job.optim.base_batch_size is not None
        if None in self._base() and self._is_scheduled:
            raise ModelError(
                f"{type(optimizer).__name__} finds its learning rate itself (lr is None), so the job's schedule has "
                "none to change: give the optimizer a rate, or the job no schedule, warm-up or base batch size."
            )

    def set(self, samples_seen: int, samples_per_epoch: int) -> None:
        """For the step after `samples_seen` samples; without a schedule the rates are the script's business."""
        if self._is_scheduled:
            factor = self.factor(samples_seen, samples_per_epoch)
            self._write([None if base is None else base * factor for base in self._base()])

    def factor(self, samples_seen: int, samples_per_epoch: int) -> float:
        """The factor on the optimizer's own rate for the step that begins after `samples_seen` samples.

        Warm-up rises linearly, counted to the end of the step, from the unscaled rate if scaling raised it (Goyal et
        al. 2017, section 2.2), else from zero. Decay follows the job's schedule over all its epochs.
        """
        job, optim, scale = self._job, self._job.optim, self._scale
        progress = min(1.0, samples_seen / (job.epochs * samples_per_epoch))
        decay = 1.0
        if optim.schedule == "cosine":
            decay = 0.5 * (1.0 + math.cos(math.pi * progress))
        elif optim.schedule == "linear":
            decay = 1.0 - progress
        elif optim.schedule == "step":
            decay = float(
                optim.step_factor ** sum(epoch <= samples_seen / samples_per_epoch for epoch in optim.step_epochs)
            )
        factor = scale * decay
        warmup = optim.warmup_epochs * samples_per_epoch
        if samples_seen >= warmup:
            return factor
        warmed = min(1.0, (samples_seen + job.global_batch_size) / warmup)
        start = 1.0 / scale if scale > 1.0 else 0.0
        return factor * (start + (1.0 - start) * warmed)

    @contextmanager
    def at_base(self) -> Iterator[Optimizer]:
        """A context in which the optimizer has its base rates."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._write(self._base())
        try:
            yield self._optimizer
        finally:
            self._write(rates)

    def _base(self) -> list[float | None]:
        """The base rates of all groups; one that the script has added meanwhile has the rate it was given."""
        for part, known in zip(parts_of(self._optimizer), self._known, strict=True):
            added = [group.get("lr") for group in part.param_groups[len(known) :]]
            known += [None if rate is None else float(rate) for rate in added]
        return [rate for known in self._known for rate in known]

    def _write(self, rates: list[float | None]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def counts_epochs(job: Job) -> bool:
    """Whether the learning rate depends on how many epochs have passed."""
    return job.optim.schedule != "constant" or job.optim.warmup_epochs > 0


def describe_scaling(job: Job) -> str | None:
    """One sentence for the log when the batch changed the rate; None when it did not."""
    factor = job.lr_scale
    if factor == 1.0:
        return None
    return (
        f"Learning rate {job.optim.lr:g} x {factor:g} = {job.optim.lr * factor:g}: global batch "
        f"{job.global_batch_size} is {job.global_batch_size / (job.optim.base_batch_size or 1):g} times the base batch "
        f"{job.optim.base_batch_size} ({job.optim.lr_scaling} rule, warm-up {job.optim.warmup_epochs:g} epochs)."
    )


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function or class has a parameter of this name."""
    return name in inspect.signature(function).parameters


def checked_options(
    function: Callable[..., Any], options: dict[str, Any], who: str, where: str, num_given: int = 0
) -> dict[str, Any]:
    """`options` if `function` takes them besides its first `num_given` arguments, and, where these are none, needs no
    others. Raises `JobError` for others."""
    signature = inspect.signature(function)
    bind = signature.bind_partial if num_given else signature.bind
    try:
        bind(*[None] * num_given, **options)
    except TypeError as problem:
        own = list(signature.parameters)[num_given:]
        hint = "".join(did_you_mean(name, own) for name in options if name not in own)
        raise JobError(f"{where}: {who}: {problem}; {hint}its options are {', '.join(own) or 'none'}.") from None
    return options
