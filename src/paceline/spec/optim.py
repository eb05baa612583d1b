"""The keys of a job that say how weights are updated: its tables `optim` and `optim.scheduler`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from paceline.errors import JobError
from paceline.spec.codec import Bounds, NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval

DecayRate = Annotated[float, Bounds(low=0, below=1)]


@dataclass(frozen=True)
class SchedulerSpec:
    """A learning-rate scheduler of torch, of transformers or of the user, beside the schedule in samples."""

    name: str | None = None
    """An import path, such as "torch.optim.lr_scheduler:OneCycleLR", called with the optimizer and `options`."""
    every: Literal["step", "epoch"] = "step"
    """After what it moves."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments; `total_steps` or `num_training_steps`, where it has it, is the run's number of them."""


@dataclass(frozen=True)
class OptimSpec:
    """Optimizer, learning-rate schedule, and the rule that scales the rate with the global batch."""

    name: str = "sgd"
    """A class of torch.optim, such as "sgd", "adamw" or "rmsprop", or an import path "package.module:Optimizer"."""
    lr: PositiveFloat = 0.1
    """The learning rate, for `base_batch_size` samples a step."""
    momentum: UnitInterval = 0.9
    """Momentum of "sgd"."""
    nesterov: bool = False
    """Whether the momentum of "sgd" is Nesterov's."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of the two running means of "adam" and "adamw"."""
    eps: PositiveFloat = 1e-8
    """The number that "adam" and "adamw" add to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, as the optimizer defines it."""
    decay_norms_and_biases: bool = True
    """Whether parameters of fewer than two dimensions, which are those of norm layers and biases, decay too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the optimizer."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other options for some parameters, by a pattern of their names: "head.*" = { lr = 0.01 }; the first counts."""
    scheduler: SchedulerSpec = field(default_factory=SchedulerSpec)
    """A scheduler that sets the rate by itself; needs schedule = "constant" and no warm-up."""
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """How the learning rate changes after the warm-up, counted in samples: not at all, along a cosine or a line to 0,
    in steps."""
    step_epochs: tuple[PositiveFloat, ...] = ()
    """Epochs at which the step schedule multiplies the rate by `step_factor`, in any order."""
    step_factor: PositiveFloat = 0.1
    """What each step of the step schedule multiplies the rate by."""
    warmup_epochs: NonNegativeFloat = 0.0
    """Epochs in which the rate rises linearly to its full value."""
    base_batch_size: PositiveInt | None = None
    """The global batch size for which `lr` was chosen; None: this job's own."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate follows a global batch other than `base_batch_size`: in proportion, by the square root, or not."""
    label_smoothing: UnitInterval = 0.0
    """The share of a target that is spread evenly over all classes."""
    clip_norm: PositiveFloat | None = None
    """The largest norm of the whole gradient; None: not clipped."""

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise JobError("optim.nesterov = True needs optim.momentum greater than 0.")
        if self.scheduler.name is not None and (
            self.schedule != "constant" or self.warmup_epochs or self.base_batch_size
        ):
            raise JobError(
                "optim.scheduler sets the learning rate by itself; leave out optim.schedule, optim.warmup_epochs and "
                "optim.base_batch_size."
            )
        if self.schedule == "step" and not self.step_epochs:
            raise JobError("optim.schedule = 'step' needs optim.step_epochs, such as [15, 25].")

    @property
    def state_copies(self) -> int:
        """How many values the optimizer keeps per parameter."""
        if self.name.lower() == "sgd":
            return int(self.momentum > 0)
        return 1 if self.name.lower() in ("adagrad", "rprop", "rmsprop", "asgd") else 2
