"""The models of the zoo, their samples and losses, and how workers train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from tests.kit.engines import Engine
from tests.kit.oracle import Learned, Task, learn, order
from tests.kit.train import init
from tests.zoo import of_torch, samples
from tests.zoo.samples import IGNORED, Samples

LARGEST_DIFFERENCE = 1e-12
"""Of any weight, buffer or loss in float64, in units of the largest value of its tensor or of 1."""


@dataclass(frozen=True)
class Entry:
    """A model of the zoo and how it is trained."""

    make: Callable[[], nn.Module]
    read: Callable[[], Samples]
    loss: Callable[[Any, dict[str, Tensor]], Tensor | tuple[Tensor, Tensor]]
    """From what the model returned and the batch to the mean loss; or a mean and its weight."""
    inputs: tuple[str, ...]
    """The entries of a batch that the model is called with, by keyword."""
    about: str
    """What is special about it."""
    lr: float = 0.05
    leaves_parameters_unused: bool = False
    has_tensor_plan: bool = False
    is_cut: str = "at blocks"
    """Why a pipeline refuses the model, by a word of the sentence; else "at blocks"."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.read()[0])

    @property
    def task(self) -> Task:
        """As `oracle` wants it: samples are tuples."""
        data: Any = [tuple(sample.values()) for sample in self.read()]
        return Task(
            model=self._seeded,
            loss=partial(_loss_of_tuple, self),
            data=data,
            optimizer=partial(torch.optim.SGD, lr=self.lr, momentum=0.9),
            epochs=1,
            clip_norm=1.0,
        )

    def example(self) -> dict[str, Tensor]:
        """What the model is called with, for four samples, in float64."""
        found = {name: torch.stack([sample[name] for sample in self.read()[:4]]) for name in self.inputs}
        return {name: value.double() if value.is_floating_point() else value for name, value in found.items()}

    def _seeded(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def loss_of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        return self.loss(model(**{name: batch[name] for name in self.inputs}), batch)


def _loss_of_tuple(entry: Entry, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    return entry.loss_of(model, dict(zip(entry.names, batch, strict=True)))


def loss_of(entry: Entry, model: nn.Module, batch: Any) -> Tensor | paceline.Mean:
    found = entry.loss_of(model, batch)
    return paceline.Mean(found[0], weight=found[1]) if isinstance(found, tuple) else found


# --- losses ---


def _logits(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def class_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(_logits(output), batch["labels"])


def token_loss(output: Any, batch: dict[str, Tensor], shift: int = 0) -> tuple[Tensor, Tensor]:
    """The mean over the tokens that are not padding, and their number."""
    logits, labels = _logits(output), batch["labels"][:, shift:]
    logits = logits[:, : labels.shape[1]]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return loss, (labels != IGNORED).sum()


next_token_loss = partial(token_loss, shift=1)


def pixel_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["mask"])


def decoded_loss(output: of_torch.Decoded, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output.images, batch["pixel_values"]) + 0.01 * output.divergence.mean()


def quantized_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    images, commitment = output
    return F.mse_loss(images, batch["pixel_values"]) + 0.25 * commitment.mean()


def contrastive_loss(output: Any, _batch: dict[str, Tensor]) -> Tensor:
    """Each caption against all images of the virtual shard, and each image against all captions."""
    own = torch.arange(len(output.logits_per_text))
    return (F.cross_entropy(output.logits_per_text, own) + F.cross_entropy(output.logits_per_image, own)) / 2


# --- the models ---


def _from_transformers(name: str) -> Callable[[], nn.Module]:
    """Loads transformers, which takes seconds, when the model is built."""

    def make() -> nn.Module:
        from tests.zoo import of_transformers

        built: nn.Module = getattr(of_transformers, name)()
        return built

    return make


_TEXT = ("input_ids", "attention_mask")
_TRANSLATION = (*_TEXT, "decoder_input_ids")
_IMAGE = ("pixel_values",)
_CHANGES_BUFFERS = "buffers"


def _language(name: str, about: str, **values: Any) -> Entry:
    return Entry(_from_transformers(name), samples.padded_text, next_token_loss, _TEXT, about, **values)


def _image_classifier(make: Callable[[], nn.Module], about: str, **values: Any) -> Entry:
    return Entry(make, samples.images, class_loss, _IMAGE, about, **values)


def _text_classifier(make: Callable[[], nn.Module], about: str, **values: Any) -> Entry:
    return Entry(make, samples.classified_text, class_loss, _TEXT, about, **values)


ZOO: dict[str, Entry] = {
    "gpt2": _language("gpt2", "causal language model, tied embeddings"),
    "gpt2-checkpointed": _language("checkpointed_gpt2", "activation checkpointing"),
    "llama": _language("llama", "grouped-query attention", has_tensor_plan=True),
    "llama-lora": _language("lora_llama", "low-rank adapters of peft on frozen weights", lr=0.5),
    "opt": _language("opt", "causal language model"),
    "mixtral": _language("mixtral", "mixture of experts"),
    "qwen2-moe": _language("qwen2_moe", "experts beside a shared one"),
    "bert": _text_classifier(_from_transformers("bert"), "classifier"),
    "distilbert": _text_classifier(_from_transformers("distilbert"), "classifier"),
    "t5": Entry(
        _from_transformers("t5"),
        samples.translated_text,
        token_loss,
        _TRANSLATION,
        "encoder and decoder, relative positions",
    ),
    "vit": _image_classifier(_from_transformers("vit"), "image classifier"),
    "resnet": Entry(_from_transformers("resnet"), partial(samples.images, side=16), class_loss, _IMAGE, "batch norm"),
    "clip": Entry(
        _from_transformers("clip"),
        samples.captioned_images,
        contrastive_loss,
        (*_TEXT, *_IMAGE),
        "contrastive loss inside a shard, a scalar parameter",
    ),
    "whisper": Entry(
        _from_transformers("whisper"),
        samples.spoken_text,
        token_loss,
        ("input_features", "decoder_input_ids"),
        "spectrograms to text",
    ),
    "wav2vec2": Entry(
        _from_transformers("wav2vec2"),
        samples.sound_waves,
        class_loss,
        ("input_values",),
        "skips layers at random, masks by NumPy's generator",
        leaves_parameters_unused=True,
        is_cut="value of a tensor",
    ),
    "torch-transformer": Entry(
        of_torch.Translator, samples.translated_text, token_loss, _TRANSLATION, "`nn.Transformer` with padding masks"
    ),
    "packed-lstm": _text_classifier(of_torch.PackedLSTM, "bidirectional, packed sequences", is_cut="packed"),
    "unet": Entry(of_torch.UNet, samples.images, pixel_loss, _IMAGE, "skip connections, batch norm"),
    "vae": Entry(
        of_torch.VariationalAutoencoder, samples.images, decoded_loss, _IMAGE, "draws its code, returns a dataclass"
    ),
    "plain-objects": _image_classifier(of_torch.PlainObjects, "blocks return objects of a class of their own"),
    "spectral-norm": _image_classifier(of_torch.SpectralNorm, "buffers: singular vectors", is_cut=_CHANGES_BUFFERS),
    "moving-averages": _image_classifier(
        of_torch.MovingAverages, "buffers: an average and a counter", is_cut=_CHANGES_BUFFERS
    ),
    "vq-vae": Entry(
        of_torch.QuantizedAutoencoder,
        samples.images,
        quantized_loss,
        _IMAGE,
        "buffers: a codebook",
        is_cut=_CHANGES_BUFFERS,
    ),
    "instance-norm": _image_classifier(of_torch.InstanceNorms, "buffers: running statistics", is_cut=_CHANGES_BUFFERS),
    "tied-words": Entry(
        of_torch.TiedWords, samples.padded_text, token_loss, ("input_ids",), "the embedding is the classifier"
    ),
    "checkpointed": _image_classifier(of_torch.Checkpointed, "recomputed batch norm and dropout"),
    "partly-frozen": _image_classifier(of_torch.PartlyFrozen, "a frozen encoder beside a trained one"),
}


# --- training ---


@dataclass(frozen=True)
class Compared:
    """What a worker made of a model, beside the oracle."""

    weights_sha256: str = ""
    difference: float = 0.0
    """From the oracle, on rank 0; see `LARGEST_DIFFERENCE`."""
    num_changed: int = 0
    """Weights and buffers that training has changed, on rank 0."""
    refusal: str = ""


def train_beside_oracle(name: str, engine: Engine) -> Compared:
    """Train a model for an epoch in every worker, and on rank 0 by the oracle too."""
    entry = ZOO[name]
    task = entry.task
    torch.set_num_threads(1)
    try:
        with init(engine, task) as run:
            run.say = lambda _sentence: None
            model = task.model().double()
            initial = {key: value.detach().clone() for key, value in model.state_dict().items()}
            optimizer = task.optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
            run.prepare(
                model,
                optimizer,
                find_unused_parameters=entry.leaves_parameters_unused,
                example=entry.example() if engine.has_stages else None,
            )
            data = entry.read()
            sampler = partial(order, num_samples=len(data))
            losses = [float(run.step(batch, partial(loss_of, entry))) for batch in run.batches(data, sampler=sampler)]
            weights = {key: value.detach().clone() for key, value in run.whole_state().items()}
            weights_sha256 = run.weights_sha256()
    except paceline.errors.PacelineError as refusal:
        return Compared(refusal=str(refusal))
    if run.rank:
        return Compared(weights_sha256)
    num_changed = sum(not torch.equal(initial[key], value) for key, value in weights.items())
    return Compared(weights_sha256, largest_difference(Learned(tuple(losses), weights), learn(task)), num_changed)


def largest_difference(found: Learned, expected: Learned) -> float:
    assert found.weights.keys() == expected.weights.keys()
    pairs = [(value, expected.weights[name]) for name, value in found.weights.items() if value.numel()]
    pairs.append((torch.tensor(found.losses), torch.tensor(expected.losses)))
    return max(
        float((mine.double() - theirs.double()).abs().max()) / max(1.0, float(theirs.double().abs().max()))
        for mine, theirs in pairs
    )
