"""`Job`: what to train, never how it is spread over devices."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.errors import JobError, shortened, shown
from paceline.spec.aggregation import AggregationSpec
from paceline.spec.codec import PLAIN, JsonValue, above_zero, at_least, between, check_values
from paceline.spec.evaluation import EarlyStoppingSpec, Mode
from paceline.spec.optim import OptimSpec

Parity = Literal["numeric", "bitwise"]
Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Reaction = Literal["skip", "rollback", "stop", "ignore"]
Augmentation = Literal["crop", "flip", "cutout"]

JOB_FILE = "job.json"
"""The job, in a run folder."""

TRACKER_NAMES = ("tensorboard", "wandb", "mlflow")
"""Where measured values can be logged besides the run folder."""
MOST_SAMPLES = 2**31 - 1
"""In a global batch, or a pass over it."""
MOST_WORKERS = 2**20
"""The most workers that one run may have."""
MOST_NAME_CHARACTERS = 200
"""The most characters of a job's name, which is part of the names of folders."""


@dataclass(frozen=True)
class ModelSpec:
    """A reference model by name, or any callable by import path ("package.module:build")."""

    name: str = "lenet"
    """A name that `paceline list models` shows, or an import path "package.module:build"."""
    options: dict[str, Any] = field(default_factory=dict, metadata=PLAIN)
    """Keyword arguments for the model's constructor."""


@dataclass(frozen=True)
class DataSpec:
    """A data set by name ("digits", "mnist", "cifar10", "folder", "text", ...) or by import path.

    An import path names a callable `build(split, **options)` that returns a map-style data set, or a pair of
    them (train, test) when called without `split`.
    """

    name: str = "digits"
    """A name that `paceline list data` shows, or an import path "package.module:build"."""
    dir: str | None = None
    """The folder with the files of the data set. None: published sets come from the Hugging Face hub, by `datasets`."""
    augment: tuple[Augmentation, ...] = ()
    """Random changes of training images, the same ones on any number of workers."""
    crop_padding: int = at_least(1, 4)
    """Pixels around an image before a part of its former size is cut out ("crop")."""
    cutout_size: int = at_least(1, 8)
    """Edge of the square that "cutout" blanks, in pixels."""
    loader_workers: int = at_least(0, 0)
    """DataLoader processes per worker, for data sets that do not live in memory."""
    train_limit: int | None = at_least(1, None)
    """The number of training samples to use, from the first; None: all."""
    test_limit: int | None = at_least(1, None)
    """The number of test samples to use, from the first; None: all."""
    options: dict[str, Any] = field(default_factory=dict, metadata=PLAIN)
    """Keyword arguments for the data set's builder."""


@dataclass(frozen=True)
class CheckpointSpec:
    """Which checkpoints a run saves, when, and for how long they are kept."""

    save_final: bool = True
    """Write model.safetensors into the run folder at the end."""
    dir: str | None = None
    """Where checkpoints go: a folder that all nodes see, or an address such as s3://bucket/run. None: with the run's
    results; a user's own script then keeps none."""
    every_minutes: float | None = above_zero(2.0)
    """Minutes between checkpoints; None: not by time."""
    every_steps: int | None = at_least(1, None)
    """Steps between checkpoints; None: not by steps."""
    every_epoch: bool = True
    """Whether to save at the end of each epoch, after its evaluation."""
    keep_last: int = between(1, MOST_SAMPLES, 2)
    """How many of the newest checkpoints are kept."""
    keep_every_hours: float | None = above_zero(None)
    """Also keep the first checkpoint of every period of this many hours."""
    keep_best: str | None = None
    """Also keep the best checkpoint by this metric of `evaluate`, such as "accuracy"; early stopping keeps the best by
    its own metric where this is left out."""
    best_mode: Mode = "auto"
    """Whether the best by `keep_best` is the smallest ("min") or the largest ("max"); "auto": the smallest where the
    metric's name says loss, error or perplexity."""


@dataclass(frozen=True)
class CallbackSpec:
    """A callback of a training job, called at the events of its loop."""

    name: str
    """An import path "package.module:Class" of a subclass of `paceline.Callback`."""
    options: dict[str, Any] = field(default_factory=dict, metadata=PLAIN)
    """Keyword arguments for its constructor."""


@dataclass(frozen=True)
class Job(JsonValue):
    """What to train. The result of a run depends on its job only; the devices affect only its speed."""

    FORMER_KEYS: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "micro_batch_size": (
            None,
            "one virtual shard goes through the model at a time; raise virtual_shards where a shard does not fit.",
        ),
        "norm": (
            "shard",
            "batch norm normalises every virtual shard by itself; lower virtual_shards for statistics of more samples.",
        ),
        "shard_by_shard": (False, "every virtual shard goes through the loss function by itself; leave the key out."),
    }

    name: str = "job"
    """What tables and pages call the job; a file's name if it is left out."""
    global_batch_size: int = between(1, MOST_SAMPLES, 256)
    """Samples of one optimizer update, over all workers."""
    virtual_shards: int = between(1, MOST_WORKERS, 8)
    """The number of virtual shards of every global batch, which is also the maximum number of workers."""
    fuse_shards: int | None = at_least(1, None)
    """The most samples of a worker's virtual shards that go through the model together, where samples are independent
    and the forward pass draws no random numbers; None: each shard goes by itself."""
    epochs: int = between(1, MOST_SAMPLES, 1)
    """Passes over the training set."""
    seed: int = between(0, 2**63 - 1, 0)
    """The seed of weights, order, augmentation and dropout."""
    parity: Parity = "numeric"
    """What stays equal when the number of workers changes: results up to rounding, or every bit."""
    precision: Precision = "float32"
    """The precision of forward passes: bfloat16 and float16 are mixed precision with float32 weights; "auto": bfloat16
    where all workers have GPUs that compute fast in it, else float32. A checkpoint is resumed in its own precision:
    name it where "auto" would mean another one."""
    tf32: bool | None = None
    """Whether GPUs that have it compute float32 products in TF32, to 10 bits of mantissa; None: in numeric parity."""
    channels_last: bool = False
    """Whether images and convolutions use the memory format channels_last."""
    compile: bool | Literal["reduce-overhead", "max-autotune"] = False
    """Whether the model goes through torch.compile, or in which of its modes; "reduce-overhead" replays forward and
    backward passes as CUDA graphs."""
    measure_noise: bool = True
    """Whether to measure the gradient noise scale and log it every epoch; it never changes what is learned."""
    nonfinite: Reaction = "skip"
    """What to do in a step whose loss or gradient is not finite: skip the update; skip it and restore the last
    checkpoint (without repeating data); end the run; or do not check."""
    eval_every_epochs: int = at_least(1, 1)
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_every_steps: int | None = at_least(1, None)
    """Steps between two evaluations, beside those at the ends of epochs; None: only those."""
    eval_batch_size: int = between(1, MOST_SAMPLES, 256)
    """Samples in one forward pass of an evaluation."""
    average_decay: float | None = between(0, 1, None)
    """The decay of an exponential moving average of the weights, such as 0.999, which is then what is evaluated, and
    saved in model.safetensors; None: the weights themselves are."""
    callbacks: tuple[CallbackSpec, ...] = ()
    """Callbacks, called at the events of the training loop: a list of { name = "package.module:Class", options = {} },
    subclasses of `paceline.Callback`."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    aggregation: AggregationSpec = field(default_factory=AggregationSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    early_stopping: EarlyStoppingSpec = field(default_factory=EarlyStoppingSpec)

    def __post_init__(self) -> None:
        check_values(self)
        if not 1 <= len(self.name) <= MOST_NAME_CHARACTERS or not self.name.isprintable():
            raise JobError(
                f"name = {shown(self.name)} should be a text of 1 to {MOST_NAME_CHARACTERS} characters on one line."
            )
        if self.virtual_shards > self.global_batch_size:
            raise JobError(
                f"virtual_shards = {self.virtual_shards} is more than global_batch_size = "
                f"{self.global_batch_size}; every shard needs at least one sample."
            )
        if self.average_decay == 1:
            raise JobError("average_decay = 1.0 would keep the first weights for ever; it should be below 1.")
        if self.fuse_shards is not None and (self.parity == "bitwise" or self.aggregation.method != "every_step"):
            raise JobError(
                "fuse_shards needs parity = 'numeric' and aggregation.method = 'every_step', where a worker's shards "
                "are only added up; leave it out."
            )
        if self.parity == "bitwise":
            self._check_bitwise()
        self._check_aggregation()

    def _check_bitwise(self) -> None:
        """Raise `JobError` for what makes the result depend on the number of workers."""
        if self.compile:
            raise JobError("parity = 'bitwise' needs compile = false; compiled kernels may differ between shapes.")
        if self.aggregation.wire != "float32":
            raise JobError(
                f"parity = 'bitwise' needs aggregation.wire = 'float32'; {self.aggregation.wire!r} rounds what workers "
                "tell each other, so the result would depend on their number."
            )
        if self.aggregation.method != "every_step":
            raise JobError(
                f"parity = 'bitwise' needs aggregation.method = 'every_step'; with {self.aggregation.method!r} the "
                "result depends on the number of workers."
            )

    def _check_aggregation(self) -> None:
        """Raise `JobError` for what the way in which workers combine their gradients does not allow."""
        if self.nonfinite == "rollback" and self.aggregation.method != "every_step":
            raise JobError(
                f"nonfinite = 'rollback' needs aggregation.method = 'every_step'; with {self.aggregation.method!r} "
                "workers do not see the same gradients. Use nonfinite = 'skip'."
            )
        if self.aggregation.method == "parameter_server_async" and (self.precision == "float16" or self.optim.clips):
            raise JobError(
                "aggregation.method = 'parameter_server_async' computes virtual shards and updates slices of the "
                "parameters: it needs no optim.clip_norm, and a precision other than 'float16'."
            )
        if self.average_decay is not None and self.aggregation.method != "every_step":
            raise JobError(
                f"average_decay needs aggregation.method = 'every_step'; with {self.aggregation.method!r} workers do "
                "not hold the same weights after every step."
            )
        if self.eval_every_steps is not None and self.aggregation.method == "parameter_server_async":
            raise JobError(
                "eval_every_steps needs another aggregation.method than 'parameter_server_async', whose workers do not "
                "rest between steps; use eval_every_epochs."
            )

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

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Job:
        """A job from plain values; `model` and `data` may be just a name."""
        plain = dict(mapping)
        for table in ("model", "data"):
            if isinstance(plain.get(table), str):
                plain[table] = {"name": plain[table]}
        return super().from_mapping(plain)

    @property
    def timed_settings(self) -> tuple[str, ...]:
        """The settings that times of passes, updates and loading follow from, as "model.name = 'lenet'"; without a
        precision that each run decides."""
        values = self.to_mapping()
        for table in ("model", "data", "optim"):
            values |= {f"{table}.{key}": value for key, value in values[table].items()}
        timed = [path for path in _TIMED if (path, values[path]) != ("precision", "auto")]
        return tuple(f"{path} = {values[path]!r}" for path in timed)

    def with_values(self, **changes: Any) -> Job:
        """A copy with other values; nested tables take mappings, `optim={"lr": 0.2}`, merged into what is there."""
        return Job.from_mapping(_merge(self.to_mapping(), changes))

    def with_settings(self, settings: Iterable[str]) -> Job:
        """A copy with `key=value` settings from a command line, values in TOML syntax."""
        mapping = self.to_mapping()
        for setting in settings:
            parts, value = parse_setting(setting)
            for part in reversed(parts):
                value = {part: value}
            mapping = _merge(mapping, value)
        return Job.from_mapping(mapping)

    def grown(self, factor: int) -> Job:
        """This job for weak scaling on `factor` devices: batch size and virtual shards times `factor`, and a learning
        rate scaled by the rule in `optim`."""
        return dataclasses.replace(
            self,
            global_batch_size=self.global_batch_size * factor,
            virtual_shards=self.virtual_shards * factor,
            optim=dataclasses.replace(self.optim, base_batch_size=self.optim.base_batch_size or self.global_batch_size),
        )


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} as {"optim.lr": 1}."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """The differences between two jobs, as mappings, that affect results: "optim.lr was 0.1 and is 0.2"."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        path = f"{where}.{key}" if where else key
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and key != "options":
            found += differences(old, new, path)
        elif path == "precision" and new == "auto":
            continue  # it is the run that decides, and that says what it was
        elif path == "aggregation.staleness" and now.get("method") != "parameter_server_async":
            continue  # only those servers know it, and its default was another one
        elif old != new and path not in _LEARNS_THE_SAME and not path.startswith(_LEARN_THE_SAME):
            found.append(f"{path} was {old!r} and is {new!r}")
    return found


_MOST_PARTS = 20
"""The most names that the key of a setting may consist of, as "optim.lr" of two."""

_TIMED = (
    *("model.name", "model.options", "data.name", "data.augment", "data.options", "optim.name"),
    *("precision", "channels_last", "compile"),
)

_LEARNS_THE_SAME = (
    *("name", "measure_noise", "eval_every_epochs", "eval_every_steps", "eval_batch_size"),
    *("data.dir", "data.loader_workers"),
)
_LEARN_THE_SAME = ("checkpoint.", "early_stopping.")
"""Tables of which no key affects results."""


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(merged.get(key), Mapping) and isinstance(value, str) and key in ("model", "data"):
            # Another model or data set has other options; the same one keeps its own.
            value = {"name": value} if value == merged[key].get("name") else {"name": value, "options": {}}
        if isinstance(merged.get(key), Mapping) and isinstance(value, Mapping) and key != "options":
            value = _merge(merged[key], value)
        merged[key] = value
    return merged


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """The parts of the key of "optim.lr=0.1", and its value, which is written as in TOML or an unquoted text."""
    key, separator, text = setting.partition("=")
    parts = key.strip().split(".")
    if not separator or not key.strip():
        raise JobError(f"'{shortened(setting)}' is not a setting; write key=value, such as optim.lr=0.1.")
    if len(parts) > _MOST_PARTS:
        raise JobError(f"There is no key '{shortened(key)}'.")
    if text.strip().lower() in ("none", "null"):
        return parts, None
    try:
        found = _parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return parts, text.strip()
    except ValueError as problem:
        raise JobError(f"'{shortened(setting)}' is not possible: {problem}.") from None
    return parts, found["value"] if len(found) == 1 else text


def _parse_toml(text: str) -> dict[str, Any]:
    """The mapping of a TOML text. Raises `ValueError` for any mistake; `tomllib.TOMLDecodeError` if it is no TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python says how to lift its limit on digits
        raise ValueError("it has a number of more digits than any number may have") from None


def load_job(source: str | Path) -> Job:
    """The job in a TOML file. Raises `JobError` for a file that is missing, no TOML, or no job."""
    path = Path(source)
    try:
        mapping = _parse_toml(path.read_text("utf-8").removeprefix("\ufeff"))  # some editors begin a file with it
    except FileNotFoundError:
        raise JobError(f"There is no job file '{path}'.") from None
    except IsADirectoryError:
        raise JobError(f"'{path}' is a directory, not a job file.") from None
    except OSError as problem:
        raise JobError(f"The job file '{shortened(str(path))}' cannot be read: {problem.strerror}.") from None
    except ValueError as problem:
        raise JobError(f"The job file '{path}' is not valid TOML: {problem}.") from None
    if not mapping:  # rather a mistake than a wish for all of the defaults
        raise JobError(f"The job file '{path}' has no keys; give it some of those that `paceline list keys` shows.")
    mapping.setdefault("name", path.stem[:MOST_NAME_CHARACTERS])
    try:
        return Job.from_mapping(mapping)
    except JobError as problem:
        raise JobError(f"{path}: {problem}") from None
