"""`Job`: what to train, never how it is spread over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from paceline.errors import JobError, shown
from paceline.spec.algorithm import WireName
from paceline.spec.codec import (
    Bounds,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check_values,
)

Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Mode = Literal["auto", "min", "max"]
"""Which value of a metric is the best."""

JOB_FILE = "job.json"
"""The job, in a run folder."""

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""Where measured values can be logged besides the run folder."""
MOST_SAMPLES = 2**31 - 1
"""The most samples of a global batch, or of a pass over it."""
MOST_WORKERS = 2**20
"""The most workers that one run may have."""
SampleCount = Annotated[int, Bounds(low=1, high=MOST_SAMPLES)]
WorkerCount = Annotated[int, Bounds(low=1, high=MOST_WORKERS)]
DecayRate = Annotated[float, Bounds(low=0, below=1)]


@dataclass(frozen=True)
class ModelSpec:
    """A reference model by name, or any callable by import path ("package.module:build")."""

    may_be_a_name: ClassVar = True
    name: str = "lenet"
    """A name that `paceline list models` shows, or an import path "package.module:build"."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the model's constructor."""


@dataclass(frozen=True)
class DataSpec:
    """A data set by name ("digits", "mnist", "cifar10", "folder", "text", ...), or a callable by import path:
    `build(split, **options)` returns a map-style data set, or a pair of them (train, test) without `split`."""

    may_be_a_name: ClassVar = True
    name: str = "digits"
    """A name that `paceline list data` shows, or an import path "package.module:build"."""
    dir: str | None = None
    """The folder with the files of the data set. None: published sets come from the Hugging Face hub, by `datasets`."""
    augment: tuple[Literal["crop", "flip", "cutout"], ...] = ()
    """Random changes of training images, the same ones on any number of workers."""
    crop_padding: PositiveInt = 4
    """Pixels around an image before a part of its former size is cut out ("crop")."""
    cutout_size: PositiveInt = 8
    """Edge of the square that "cutout" blanks, in pixels."""
    loader_workers: NonNegativeInt = 0
    """DataLoader processes per worker, for data sets that do not live in memory."""
    train_limit: PositiveInt | None = None
    """The number of training samples to use, from the first; None: all."""
    test_limit: PositiveInt | None = None
    """The number of test samples to use, from the first; None: all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the data set's builder."""


@dataclass(frozen=True)
class SchedulerSpec:
    """A learning-rate scheduler of torch, of transformers or of the user, beside the schedule in samples."""

    name: str | None = None
    """An import path, such as "torch.optim.lr_scheduler:OneCycleLR", called with the optimizer and `options`."""
    every: Literal["step", "epoch"] = "step"
    """Whether it moves after each step or after each epoch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments; its `total_steps` or `num_training_steps`, if it has one, is the run's number of steps."""


@dataclass(frozen=True)
class OptimSpec:
    """Optimizer, learning-rate schedule, and the rule that scales the rate with the global batch."""

    name: str = "sgd"
    """A class of torch.optim, such as "sgd", "adamw" or "rmsprop", or an import path "package.module:Optimizer"."""
    lr: PositiveFloat = 0.1
    """The learning rate, for `base_batch_size` samples a step."""
    momentum: UnitInterval = 0.9
    """Momentum of "sgd"."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, as the optimizer defines it."""
    decay_norms_and_biases: bool = True
    """Whether parameters of fewer than two dimensions, which are those of norm layers and biases, decay too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the optimizer, such as { nesterov = true } or { betas = [0.9, 0.95] }."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other options for some parameters, by a pattern of their names: "head.*" = { lr = 0.01 }; the first counts."""
    scheduler: SchedulerSpec = field(default_factory=SchedulerSpec)
    """A scheduler that sets the rate by itself; needs schedule = "constant" and no warm-up."""
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """How the learning rate changes after the warm-up, counted in samples."""
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
        if self.schedule == "step" and not self.step_epochs:
            raise JobError("optim.schedule = 'step' needs optim.step_epochs, such as [15, 25].")


@dataclass(frozen=True)
class CheckpointSpec:
    """Which checkpoints a run saves, when, and for how long they are kept."""

    save_final: bool = True
    """Write model.safetensors into the run folder at the end."""
    dir: str | None = None
    """Where checkpoints go: a folder that all nodes see, or an address such as s3://bucket/run. None: with the run's
    results; a user's own script then keeps none."""
    every_minutes: PositiveFloat | None = 2.0
    """Minutes between checkpoints; None (on the command line =none): not by time."""
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; None: not by steps."""
    every_epoch: bool = True
    """Whether to save at the end of each epoch, after its evaluation."""
    keep_last: SampleCount = 2
    """How many of the newest checkpoints are kept."""
    keep_every_hours: PositiveFloat | None = None
    """Also keep the first checkpoint of every period of this many hours."""
    keep_best: str | None = None
    """Also keep the best checkpoint by this metric, such as "accuracy"; None: by early stopping's metric, if any."""
    best_mode: Mode = "auto"
    """Which value of `keep_best` is the best; "auto": the smallest of a loss, error or perplexity, by its name."""


@dataclass(frozen=True)
class AggregationSpec:
    """How workers aggregate their gradients, and how often; with other methods and wire formats than the defaults the
    result depends on the number of workers."""

    method: Literal["every_step", "local_sgd", "diloco", "parameter_server_async"] = "every_step"
    """When gradients are summed: every step; or weights are averaged every few steps ("local_sgd", "diloco"); or
    servers update asynchronously."""
    wire: Literal[WireName, "auto-lossy"] = "float32"
    """The wire format; "auto-lossy": "bfloat16" between nodes, "float32" on one."""
    sync_every: PositiveInt = 16
    """Steps between two outer steps, with local_sgd and diloco."""
    outer_lr: PositiveFloat = 0.7
    """The learning rate of outer steps, with diloco."""
    outer_momentum: UnitInterval = 0.9
    """The Nesterov momentum of outer steps, with diloco."""
    staleness: NonNegativeInt = 1
    """With parameter_server_async: how many updates late a gradient may be; SGD's momentum is lowered for it."""

    @property
    def is_infrequent(self) -> bool:
        """Whether workers train by themselves between two outer steps."""
        return self.method in ("local_sgd", "diloco")


@dataclass(frozen=True)
class EarlyStoppingSpec:
    """When a run ends because its evaluations do not get better any more."""

    metric: str | None = None
    """The metric, "accuracy" or "loss", that evaluations have to improve, or the run ends; None: no early stopping."""
    patience: PositiveInt = 5
    """How many evaluations in a row may be no better before the run ends."""
    min_change: NonNegativeFloat = 0.0
    """The least improvement over the best value so far that counts."""
    mode: Mode = "auto"
    """Which value is the best; "auto": the smallest of a loss, error or perplexity, by its name."""


@dataclass(frozen=True)
class CallbackSpec:
    """A callback of a training job, called at the events of its loop."""

    name: str
    """An import path "package.module:Class" of a subclass of `paceline.Callback`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for its constructor."""


@dataclass(frozen=True)
class Job(JsonValue):
    """What to train. The result of a run depends on its job only; the devices affect only its speed."""

    name: str = "job"
    """What tables and pages call the job; a file's name if it is left out."""
    global_batch_size: SampleCount = 256
    """Samples of one optimizer update, over all workers."""
    virtual_shards: WorkerCount = 8
    """The number of virtual shards of every global batch, which is also the maximum number of workers."""
    fuse_shards: PositiveInt | None = None
    """The most samples of a worker's virtual shards that go through the model together, where samples are independent
    and the forward pass draws no random numbers; None: each shard goes by itself."""
    epochs: SampleCount = 1
    """Passes over the training set."""
    seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """The seed of weights, order, augmentation and dropout."""
    parity: Literal["numeric", "bitwise"] = "numeric"
    """What stays equal when the number of workers changes: results up to rounding, or every bit."""
    precision: Precision = "float32"
    """The precision of forward passes: bfloat16 and float16 are mixed precision with float32 weights; "auto": bfloat16
    where all workers have GPUs that compute fast in it, else float32."""
    tf32: bool | None = None
    """Whether GPUs that have it compute float32 products in TF32, to 10 bits of mantissa; None: in numeric parity."""
    channels_last: bool = False
    """Whether images and convolutions use the memory format channels_last."""
    compile: Literal[False, True, "reduce-overhead", "max-autotune"] = False
    """Whether the model goes through torch.compile, or in which of its modes."""
    measure_noise: bool = True
    """Whether to measure the gradient noise scale and log it every epoch; it never changes what is learned."""
    nonfinite: Literal["skip", "rollback", "stop", "ignore"] = "skip"
    """What to do in a step whose loss or gradient is not finite: skip the update; skip it and restore the last
    checkpoint (without repeating data); end the run; or do not check."""
    eval_every_epochs: PositiveInt = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_every_steps: PositiveInt | None = None
    """Steps between two evaluations, beside those at the ends of epochs; None: only those."""
    eval_batch_size: SampleCount = 256
    """Samples in one forward pass of an evaluation."""
    average_decay: DecayRate | None = None
    """The decay, such as 0.999, of an exponential moving average of the weights, which is then evaluated and saved in
    model.safetensors; None: no average."""
    callbacks: tuple[CallbackSpec, ...] = ()
    """Callbacks of the training loop: a list of { name = "package.module:Class", options = {} }."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    aggregation: AggregationSpec = field(default_factory=AggregationSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    early_stopping: EarlyStoppingSpec = field(default_factory=EarlyStoppingSpec)

    def __post_init__(self) -> None:
        check_values(self)
        for path, value in flattened(self.to_mapping()).items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError):
                raise JobError(f"{path} = {shown(value)} should be a text, a number, a list or a table.") from None
        if not 1 <= len(self.name) <= 200 or not self.name.isprintable():
            raise JobError(f"name = {shown(self.name)} should be a text of 1 to 200 characters on one line.")
        if self.virtual_shards > self.global_batch_size:
            raise JobError(
                f"virtual_shards = {self.virtual_shards} is more than global_batch_size = "
                f"{self.global_batch_size}; every shard needs at least one sample."
            )
        method, every_step = self.aggregation.method, {"aggregation.method": "every_step"}
        is_async = method == "parameter_server_async"
        scheduled = {"optim.schedule": "constant", "optim.warmup_epochs": 0.0, "optim.base_batch_size": None}
        for setting, is_set, needs in (
            # A scheduler sets the learning rate by itself.
            ("optim.scheduler", self.optim.scheduler.name is not None, scheduled),
            # What makes the result depend on the number of workers.
            ("parity = 'bitwise'", self.parity == "bitwise", {"compile": False, "aggregation.wire": "float32"}),
            ("parity = 'bitwise'", self.parity == "bitwise", every_step),
            # A worker's shards have to be only added up.
            ("fuse_shards", self.fuse_shards is not None, {"parity": "numeric", **every_step}),
            # Workers have to see the same gradients and hold the same weights after every step.
            ("nonfinite = 'rollback'", self.nonfinite == "rollback", every_step),
            ("average_decay", self.average_decay is not None, every_step),
            # Servers update slices of the parameters whenever a gradient arrives.
            (f"aggregation.method = {method!r}", is_async, {"optim.clip_norm": None, "eval_every_steps": None}),
            (f"aggregation.method = {method!r}", is_async and self.precision == "float16", {"precision": "float32"}),
        ):
            for key, needed in needs.items():
                if is_set and (value := operator.attrgetter(key)(self)) != needed:
                    raise JobError(f"{setting} needs {key} = {needed!r}, not {value!r}.")

    @property
    def kept_checkpoints(self) -> CheckpointSpec:
        """`checkpoint`, where the best by early stopping's metric is kept if no other best is named."""
        stopping = self.early_stopping
        if stopping.metric is None or self.checkpoint.keep_best is not None:
            return self.checkpoint
        return dataclasses.replace(self.checkpoint, keep_best=stopping.metric, best_mode=stopping.mode)

    @property
    def shard_size(self) -> int:
        """Samples of the largest virtual shard."""
        return -(-self.global_batch_size // self.virtual_shards)

    @property
    def lr_scale(self) -> float:
        """How much the rate grows with the batch: k = B / B_base for "linear" (Goyal et al. 2017, section 2.1),
        sqrt(k) for "sqrt" (Krizhevsky 2014), 1 for "none" or where no base batch is stated."""
        ratio = self.global_batch_size / (self.optim.base_batch_size or self.global_batch_size)
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.optim.lr_scaling]

    @property
    def timed_settings(self) -> dict[str, str]:
        """The settings that times of passes, updates and loading follow from, as {"model.name": "'lenet'"}; without a
        precision that each run decides."""
        values = {key: operator.attrgetter(key)(self) for key in _TIMED}
        return {key: repr(value) for key, value in values.items() if (key, value) != ("precision", "auto")}

    def with_values(self, **changes: Any) -> Job:
        """A copy with other values; nested tables take mappings, `optim={"lr": 0.2}`, merged into what is there."""
        return Job.from_mapping(_merge(self.to_mapping(), changes))

    def with_settings(self, settings: Iterable[str]) -> Job:
        """A copy with `key=value` settings from a command line, values in TOML syntax."""
        return Job.from_mapping(with_settings(self.to_mapping(), settings))

    def scaled_for(self, factor: int) -> Job:
        """This job for weak scaling on `factor` devices: batch size and virtual shards times `factor`, and a learning
        rate scaled by the rule in `optim`."""
        return dataclasses.replace(
            self,
            global_batch_size=self.global_batch_size * factor,
            virtual_shards=self.virtual_shards * factor,
            optim=dataclasses.replace(self.optim, base_batch_size=self.optim.base_batch_size or self.global_batch_size),
        )


def flattened(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} as {"optim.lr": 1}."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two jobs, as mappings, that affect results: "optim.lr was 0.1 and is 0.2"."""
    old, new = flattened(before), flattened(now)
    return [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not key.startswith(_LEARNS_THE_SAME)
        and (key, new.get(key)) != ("precision", "auto")  # it is the run that decides, and that says what it was
    ]


_TIMED = (
    *("model.name", "model.options", "data.name", "data.augment", "data.options", "optim.name"),
    *("precision", "channels_last", "compile"),
)
_LEARNS_THE_SAME = (
    *("name", "measure_noise", "eval_every_", "eval_batch_size", "data.dir", "data.loader_workers"),
    *("checkpoint.", "early_stopping."),
)
"""How the keys of settings begin that do not affect results."""


def with_settings(mapping: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The nested mapping with settings such as "optim.lr=0.1" applied, one after the other; values are written as in
    TOML, or as unquoted texts."""
    import tomllib  # workers are given none

    found = dict(mapping)
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key.strip():
            raise JobError(f"{shown(setting)} is not a setting; write key=value, such as optim.lr=0.1.")
        value: Any = text.strip()
        with contextlib.suppress(ValueError):
            value = None if value.lower() in ("none", "null") else tomllib.loads(f"value = {text}")["value"]
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        found = _merge(found, value, adds_options=".options." in key)
    return found


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any], *, adds_options: bool = False) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(merged.get(key), Mapping) and isinstance(value, str) and key in ("model", "data"):
            # Another model or data set has other options; the same one keeps its own.
            value = {"name": value} if value == merged[key].get("name") else {"name": value, "options": {}}
        if isinstance(merged.get(key), Mapping) and isinstance(value, Mapping) and (adds_options or key != "options"):
            value = _merge(merged[key], value, adds_options=adds_options)
        merged[key] = value
    return merged
