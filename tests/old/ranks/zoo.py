"""Models that others wrote, their batches and losses: what is trained by every strategy, and compared.

`ZOO` names them and `COLUMNS` the ways to train them; `train_columns` trains one model after the other in the workers
that call it, so that all columns of as many workers take one launch.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import paceline
from paceline.env import worker_facts
from paceline.errors import PacelineError
from paceline.spec import Job, PipelineSpec, Plan, parse_mesh
from tests.kit.workers import in_turn
from tests.old.ranks import zoo_samples as samples
from tests.old.ranks import zoo_torch
from tests.old.ranks.zoo_samples import IGNORED, Samples

Losses = Callable[[Any, dict[str, Tensor]], Tensor]
"""From what the model returned and the batch to one loss for each sample."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo and how it is trained."""

    make: Callable[[], nn.Module]
    samples: Callable[[], Samples]
    losses: Losses
    inputs: tuple[str, ...]
    """The entries of a batch that the model is called with, by keyword."""
    may_skip: bool = False
    """Whether some steps leave parameters without a gradient."""
    num_tokens: Callable[[dict[str, Tensor]], Tensor] | None = None
    """How many tokens each sample's loss is the mean of; None: every sample counts alike."""
    lr: float = 0.05
    wrap: Callable[[Any], Any] = dict
    """Makes the batch that is given to `run.step` of the one that was read."""

    def example(self, num_samples: int = 4) -> dict[str, Tensor]:
        """What the model is called with, for a few samples."""
        data = self.samples()[:num_samples]
        return {name: torch.stack([sample[name] for sample in data]) for name in self.inputs}

    def loss(self, model: nn.Module, batch: Any) -> Tensor | paceline.Mean:
        """The mean over samples, or over the tokens of all of them that are not padding."""
        losses = self.sample_losses(model, batch)
        if self.num_tokens is None:
            return losses.mean()
        weights = self.num_tokens(batch)
        return paceline.Mean((losses * weights).sum() / weights.sum(), weight=weights.sum())

    def sample_losses(self, model: nn.Module, batch: Any) -> Tensor:
        return self.losses(model(**{name: batch[name] for name in self.inputs}), batch)


# --- losses: one number for each sample ---


def _logits(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def class_losses(output: Any, batch: dict[str, Any]) -> Tensor:
    assert len(batch.get("text", batch["labels"])) == len(batch["labels"])  # a list has an entry for each sample
    return F.cross_entropy(_logits(output), batch["labels"], reduction="none")


def token_losses(output: Any, batch: dict[str, Tensor], shift: int = 0) -> Tensor:
    """The mean over the tokens of each sample that are not padding."""
    logits, labels = _logits(output), batch["labels"]
    logits, labels = logits[:, : labels.shape[1] - shift], labels[:, shift:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / num_tokens(batch, shift)


def num_tokens(batch: dict[str, Tensor], shift: int = 0) -> Tensor:
    return (batch["labels"][:, shift:] != IGNORED).sum(1)


def num_next_tokens(batch: dict[str, Tensor]) -> Tensor:
    return num_tokens(batch, shift=1)


def next_token_losses(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(output, batch, shift=1)


def pixel_losses(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["mask"], reduction="none").mean((1, 2))


def decoded_losses(output: zoo_torch.Decoded, batch: dict[str, Tensor]) -> Tensor:
    return ((output.images - batch["pixel_values"]) ** 2).mean((1, 2, 3)) + 0.01 * output.divergence


def quantized_losses(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    images, commitment = output
    return ((images - batch["pixel_values"]) ** 2).mean((1, 2, 3)) + 0.25 * commitment


def contrastive_losses(output: Any, _batch: dict[str, Tensor]) -> Tensor:
    """Each caption against all images of the virtual shard, and each image against all captions."""
    own = torch.arange(len(output.logits_per_text))
    by_text = F.cross_entropy(output.logits_per_text, own, reduction="none")
    return (by_text + F.cross_entropy(output.logits_per_image, own, reduction="none")) / 2


# --- the models ---


def _from_transformers(name: str) -> Callable[[], nn.Module]:
    """Loads transformers, which takes seconds, when the model is built."""

    def make() -> nn.Module:
        from tests.old.ranks import zoo_transformers

        built: nn.Module = getattr(zoo_transformers, name)()
        return built

    return make


_TEXT = ("input_ids", "attention_mask")
_TRANSLATION = (*_TEXT, "decoder_input_ids")
_IMAGE = ("pixel_values",)


def _language(name: str, **values: Any) -> Entry:
    make = _from_transformers(name)
    return Entry(make, samples.padded_text, next_token_losses, _TEXT, num_tokens=num_next_tokens, **values)


def _translator(make: Callable[[], nn.Module]) -> Entry:
    return Entry(make, samples.translated_text, token_losses, _TRANSLATION, num_tokens=num_tokens)


def _text_classifier(name: str, wrap: Callable[[Any], Any]) -> Entry:
    return Entry(_from_transformers(name), samples.classified_text, class_losses, _TEXT, wrap=wrap)


def _encoded(batch: dict[str, Any]) -> Any:
    """A batch as tokenizers of transformers make it."""
    from transformers import BatchEncoding

    return BatchEncoding(batch)


def _image_classifier(make: Callable[[], nn.Module]) -> Entry:
    return Entry(make, samples.images, class_losses, _IMAGE)


ZOO: dict[str, Entry] = {
    "gpt2": _language("gpt2"),
    "gpt2-checkpointed": _language("checkpointed_gpt2"),
    "llama": _language("llama"),
    "llama-lora": _language("lora_llama", lr=0.5),
    "opt": _language("opt"),
    "mixtral": _language("mixtral"),
    "qwen2-moe": _language("qwen2_moe"),
    "bert": _text_classifier("bert", _encoded),
    "distilbert": _text_classifier("distilbert", UserDict),
    "t5": _translator(_from_transformers("t5")),
    "vit": _image_classifier(_from_transformers("vit")),
    "resnet": _image_classifier(_from_transformers("resnet")),
    "clip": Entry(_from_transformers("clip"), samples.captioned_images, contrastive_losses, (*_TEXT, *_IMAGE)),
    "whisper": Entry(
        _from_transformers("whisper"),
        samples.spoken_text,
        token_losses,
        ("input_features", "decoder_input_ids"),
        num_tokens=num_tokens,
    ),
    "wav2vec2": Entry(
        _from_transformers("wav2vec2"), samples.sound_waves, class_losses, ("input_values",), may_skip=True
    ),
    "torch-transformer": _translator(zoo_torch.Translator),
    "packed-lstm": Entry(zoo_torch.PackedLSTM, samples.classified_text, class_losses, _TEXT),
    "unet": Entry(zoo_torch.UNet, samples.images, pixel_losses, _IMAGE),
    "vae": Entry(zoo_torch.VariationalAutoencoder, samples.images, decoded_losses, _IMAGE),
    "plain-objects": _image_classifier(zoo_torch.PlainObjects),
    "spectral-norm": Entry(zoo_torch.SpectralNorm, samples.images, class_losses, _IMAGE),
    "moving-averages": _image_classifier(zoo_torch.MovingAverages),
    "vq-vae": Entry(zoo_torch.QuantizedAutoencoder, samples.images, quantized_losses, _IMAGE),
    "instance-norm": _image_classifier(zoo_torch.InstanceNorms),
    "tied-words": Entry(zoo_torch.TiedWords, samples.padded_text, token_losses, ("input_ids",), num_tokens=num_tokens),
    "checkpointed": _image_classifier(zoo_torch.Checkpointed),
    "partly-frozen": _image_classifier(zoo_torch.PartlyFrozen),
}

ABOUT = {
    "gpt2": "causal language model, tied embeddings",
    "gpt2-checkpointed": "activation checkpointing",
    "llama": "grouped-query attention",
    "llama-lora": "low-rank adapters of peft on frozen weights",
    "opt": "causal language model",
    "mixtral": "mixture of experts",
    "qwen2-moe": "experts beside a shared one",
    "bert": "classifier, a tokenizer's `BatchEncoding` with texts",
    "distilbert": "classifier, a `UserDict` with texts",
    "t5": "encoder and decoder, relative positions",
    "vit": "image classifier",
    "resnet": "batch norm",
    "clip": "contrastive loss inside a shard, a scalar parameter",
    "whisper": "spectrograms to text",
    "wav2vec2": "skips layers at random, masks by NumPy's generator",
    "torch-transformer": "`nn.Transformer` with padding masks",
    "packed-lstm": "bidirectional, packed sequences",
    "unet": "skip connections, batch norm",
    "vae": "draws its code, returns a dataclass",
    "plain-objects": "blocks return objects of a class of their own",
    "spectral-norm": "buffers: singular vectors",
    "moving-averages": "buffers: an average and a counter",
    "vq-vae": "buffers: a codebook",
    "instance-norm": "buffers: running statistics",
    "tied-words": "the embedding is the classifier",
    "checkpointed": "recomputed batch norm and dropout",
    "partly-frozen": "a frozen encoder beside a trained one",
}
"""What is special about each model, for the table."""


# --- training ---

ONE_STAGE_EACH = PipelineSpec()
TOLERANCE = 1e-12
"""Of the largest difference in float64."""


@dataclass(frozen=True)
class Column:
    """How the models of a column of the table are trained."""

    parity: str
    strategy: str = "dp"
    world_size: int = 1
    pipeline: PipelineSpec = ONE_STAGE_EACH
    sequence_parallel: bool = False

    def __str__(self) -> str:
        return f"{self.strategy if self.strategy != 'dp' else self.parity} {self.world_size}"

    @property
    def reference(self) -> Column:
        """What it must be equal to: one worker."""
        return Column(self.parity)

    @property
    def precision(self) -> str:
        return "float32" if self.parity == "bitwise" else "float64"


# Three workers, as the virtual shards are dealt out unevenly to them.
COLUMNS = (
    *(Column(parity, world_size=world_size) for parity in ("bitwise", "numeric") for world_size in (1, 3)),
    Column("numeric", "dp_one_process", 1),
    Column("numeric", "fsdp", 2),
    Column("numeric", "pp", 2),
    Column("numeric", "tp", 2),
    Column("numeric", "fsdp2 x tp2", 4),
)


@dataclass(frozen=True)
class Result:
    """What a strategy made of a model; `refusal` if it did not train it."""

    sha: str = ""
    losses: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Of rank 0 alone."""
    num_changed: int = 0
    """Weights and buffers of rank 0 that training has changed."""
    refusal: str = ""


def train_columns(chosen: Mapping[Column, Sequence[str]]) -> dict[Column, dict[str, Result]]:
    """Train the models of each column for three steps; all columns have as many workers as this launch."""
    torch.set_num_threads(1)
    found: dict[Column, dict[str, Result]] = {}
    for column, names in chosen.items():
        results = in_turn(train_entry, [(ZOO[name], column) for name in names])
        found[column] = dict(zip(names, results, strict=True))
    return found


def train_entry(entry: Entry, column: Column) -> Result:
    facts = worker_facts()
    data = entry.samples()
    try:
        with paceline.init(_job(column), plan=_plan(column)) as run:
            run.say = lambda _sentence: None
            model = entry.make()
            initial = {name: value.detach().clone() for name, value in model.state_dict().items()}
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(trained, entry.lr, momentum=0.9)
            example = entry.example() if run.mesh.pp > 1 else None
            run.prepare(model, optimizer, find_unused_parameters=entry.may_skip, example=example)
            losses = tuple(float(run.step(entry.wrap(batch), entry.loss)) for batch in run.batches(data))
            metrics = run.evaluate(data, lambda model, batch: {"loss": entry.sample_losses(model, batch)})
            state = run.whole_state()
            sha = run.weights_sha256()
    except PacelineError as refusal:
        return Result(refusal=str(refusal))
    if facts.rank:
        return Result(sha, losses, metrics)
    weights = {name: value.detach().numpy().copy() for name, value in state.items()}
    num_changed = sum(not np.array_equal(initial[name].to(state[name].dtype), value) for name, value in weights.items())
    return Result(sha, losses, metrics, weights, num_changed)


def _job(column: Column) -> Job:
    return Job.from_mapping(
        {
            "global_batch_size": 8,
            "virtual_shards": 4,
            "eval_batch_size": 4,
            "parity": column.parity,
            "precision": column.precision,
            "optim": {"clip_norm": 1.0},
        }
    )


def _plan(column: Column) -> Plan:
    return Plan(
        world_size=column.world_size,
        algorithm="tree_exact" if column.parity == "bitwise" else "all_reduce",
        timeout_s=120,
        mesh=parse_mesh(column.strategy, column.world_size, 1) if column.world_size > 1 else None,
        devices_in_process=2 if column.strategy == "dp_one_process" else 1,
        pipeline=column.pipeline,
        sequence_parallel=column.sequence_parallel,
    )


def largest_difference(one: Result, other: Result) -> float:
    """The largest difference of any weight, loss or metric, in units of the largest value of its tensor or of 1."""
    pairs = [(value, other.weights[name]) for name, value in one.weights.items()]
    pairs += [(np.asarray(mine), np.asarray(theirs)) for mine, theirs in zip(one.losses, other.losses, strict=True)]
    pairs += [(np.asarray(one.metrics[name]), np.asarray(other.metrics[name])) for name in one.metrics]
    return max(_distance(mine, theirs) for mine, theirs in pairs)


def difference_in_words(one: Result, other: Result) -> str:
    """The largest difference as a cell of a table; in bold where it is more than rounding."""
    found = largest_difference(one, other)
    return f"{found:.0e}" if found < TOLERANCE else f"**{found:.0e}**"


def _distance(mine: NDArray[Any], theirs: NDArray[Any]) -> float:
    if not mine.size:
        return 0.0
    scale = max(1.0, float(np.abs(mine).max()))
    return float(np.abs(mine.astype(np.float64) - theirs.astype(np.float64)).max()) / scale
