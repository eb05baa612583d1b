"""Small training scripts as people write them, each a function of (parity, precision) with a loop of its own.

Layers before batch norm have no bias: its gradient is 0 but for rounding, which Adam makes steps of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import paceline
from paceline.env import worker_facts
from paceline.spec import Plan


@dataclass(frozen=True)
class Outcome:
    """What a script came to."""

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, NDArray[Any]]
    sha: str


Script = Callable[[dict[str, Any]], Outcome]


def _run(settings: dict[str, Any], **values: Any) -> paceline.Run:
    facts = worker_facts()
    algorithm: Any = "tree_exact" if settings.get("parity") == "bitwise" else "all_reduce"
    plan = Plan(world_size=facts.world_size, algorithm=algorithm, timeout_s=120)
    run = paceline.init(plan=plan, **{"virtual_shards": 4, "seed": 0} | settings | values)
    run.say = lambda _sentence: None
    return run


def _outcome(run: paceline.Run, losses: list[float], metrics: dict[str, float]) -> Outcome:
    weights = {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}
    return Outcome(losses, metrics, weights, run.weights_sha256())


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- a tokenizer of transformers, DataCollatorWithPadding ---


def tokenizer_and_collator(settings: dict[str, Any]) -> Outcome:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *"abcdefghij"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(list("abcdefghij"), draw.integers(1, 9))) for _ in range(22)]
    samples = [tokenizer(text) | {"label": len(text) % 2} for text in texts]
    with _run(settings, global_batch_size=8) as run:
        config = BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, pad_token_id=0,
        )  # fmt: skip
        model: Any = BertForSequenceClassification(config)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, _ = run.prepare(model, optimizer)
        collate = DataCollatorWithPadding(tokenizer)
        losses = [
            float(run.step(batch, lambda model, batch: model(**batch).loss))
            for batch in run.batches(samples, collate_fn=collate)
        ]

        def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"accuracy": (model(**batch).logits.argmax(-1) == batch["labels"]).double()}

        return _outcome(run, losses, run.evaluate(samples, measure, collate_fn=collate))


# --- samples that are dataclasses ---


@dataclass
class Example:
    features: Tensor
    target: Tensor
    name: str


class Examples(Dataset[Example]):
    def __init__(self) -> None:
        self._x = torch.randn(21, 6, generator=_draw(1))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> Example:
        return Example(self._x[number], self._x[number].sum() > 0, f"sample {number}")


def dataclasses_as_samples(settings: dict[str, Any]) -> Outcome:
    def collate(samples: list[Example]) -> Example:
        features, targets = torch.stack([one.features for one in samples]), torch.stack([one.target for one in samples])
        return Example(features, targets, ",".join(one.name for one in samples))

    def loss_fn(model: nn.Module, batch: Example) -> Any:
        logits = model(batch.features).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.target.to(logits.dtype))
        return loss, {"hits": ((logits > 0) == batch.target).double().mean()}

    with _run(settings, global_batch_size=8, epochs=2) as run:
        model: Any = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        losses: list[float] = []
        for batch in run.batches(Examples(), collate_fn=collate):
            losses += [float(run.step(batch, loss_fn)), float(run.values["hits"])]
        return _outcome(run, losses, {})


# --- an IterableDataset with worker processes, which splits itself by get_worker_info ---


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 30, step):
            yield {"x": torch.randn(5, generator=_draw(number)), "y": torch.tensor(float(number % 3))}


def iterable_with_workers(settings: dict[str, Any]) -> Outcome:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"])

    def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": (model(batch["x"]).squeeze(-1) - batch["y"]).abs()}

    with _run(settings, global_batch_size=8) as run:
        model: Any = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        loader = DataLoader(Lines(), batch_size=8, num_workers=2)
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(loader)]
        return _outcome(run, losses, run.evaluate(loader, measure))


# --- ragged sound, packed for an LSTM ---


class Sounds(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 19

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        length = 3 + number * 7 % 11
        return torch.randn(length, 4, generator=_draw(number)), number % 3


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, sounds: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(sounds, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        logits: Tensor = self.head(states.sum(1) / lengths[:, None])
        return logits


def packed_sounds(settings: dict[str, Any]) -> Outcome:
    def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        sounds = [sound for sound, _ in samples]
        lengths = torch.tensor([len(sound) for sound in sounds])
        return pad_sequence(sounds, batch_first=True), lengths, torch.tensor([label for _, label in samples])

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        sounds, lengths, labels = batch
        return F.cross_entropy(model(sounds, lengths), labels)

    def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        sounds, lengths, labels = batch
        return {"accuracy": (model(sounds, lengths).argmax(1) == labels).double()}

    with _run(settings, global_batch_size=6) as run:
        model: Any = Listener()
        model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        loader = DataLoader(Sounds(), batch_size=6, shuffle=True, collate_fn=collate)
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(loader)]
        return _outcome(run, losses, run.evaluate(Sounds(), measure, collate_fn=collate))


# --- two augmented views of a sample against all others ---


class Views(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, generator=_draw(number))
        return x + 0.1 * torch.randn(8), x * (torch.rand(8) > 0.2)  # by the global generator, as transforms draw


def contrastive(settings: dict[str, Any]) -> Outcome:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        first, second = (F.normalize(model(view), dim=1) for view in batch)
        scores = first @ second.T / 0.5
        own = torch.arange(len(scores))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    with _run(settings, global_batch_size=10) as run:
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(Views())]
        return _outcome(run, losses, {})


# --- a VAE with two named losses ---


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_var = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return {"images": self.decode(code), "mean": mean, "log_var": log_var}


def autoencoder(settings: dict[str, Any]) -> Outcome:
    data = TensorDataset(torch.randn(22, 8, generator=_draw(3)))

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        reconstruction = F.mse_loss(out["images"], batch[0], reduction="none").sum(1).mean()
        divergence = -0.5 * (1 + out["log_var"] - out["mean"] ** 2 - out["log_var"].exp()).sum(1).mean()
        return reconstruction + 0.1 * divergence, {"reconstruction": reconstruction, "divergence": divergence}

    with _run(settings, global_batch_size=8) as run:
        model: Any = Autoencoder()
        model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        losses: list[float] = []
        for batch in run.batches(data):
            losses.append(float(run.step(batch, loss_fn)))
            losses += [float(run.values["reconstruction"]), float(run.values["divergence"])]
        return _outcome(run, losses, {})


# --- segmentation, torchmetrics ---


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        logits: Tensor = self.head(torch.cat([wide, self.up(self.middle(wide))], 1))
        return logits


def segmentation(settings: dict[str, Any]) -> Outcome:
    from torchmetrics.classification import MulticlassJaccardIndex

    images = torch.randn(18, 3, 8, 8, generator=_draw(4))
    data = TensorDataset(images, (images.mean(1) * 2).long().clamp(0, 2))

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        logits = model(batch[0])
        return {"hits": (logits.argmax(1) == batch[1]).double().mean((1, 2)), "overlap": (logits, batch[1])}

    with _run(settings, global_batch_size=8, eval_batch_size=4) as run:
        model: Any = SmallUNet()
        model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        losses = [
            float(run.step(batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])))
            for batch in run.batches(data)
        ]
        metrics = run.evaluate(data, measure, {"overlap": MulticlassJaccardIndex(num_classes=3)})
        return _outcome(run, losses, metrics)


# --- a weighted sampler in a loader ---


def weighted_sampler(settings: dict[str, Any]) -> Outcome:
    inputs = torch.randn(40, 6, generator=_draw(5))
    labels = (torch.arange(40) % 10 == 0).long()
    weights = [9.0 if label else 1.0 for label in labels.tolist()]
    sampler = WeightedRandomSampler(weights, 30, replacement=True)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, sampler=sampler, num_workers=1)
    with _run(settings, global_batch_size=8, epochs=2) as run:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, _ = run.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)
        run.keep("scheduler", scheduler)
        losses: list[float] = []
        for batch in run.batches(loader):
            losses.append(float(run.step(batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))))
            scheduler.step()
        return _outcome(run, losses, {})


# --- gradient accumulation by itself ---


def automatic_micro_batch(settings: dict[str, Any]) -> Outcome:
    data = TensorDataset(torch.randn(34, 6, generator=_draw(6)), torch.randint(3, (34,), generator=_draw(7)))
    with _run(settings, global_batch_size=16, epochs=2) as run:
        model: Any = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        losses = [
            float(run.step(batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])))
            for batch in run.batches(data)
        ]
        return _outcome(run, losses, {})


# --- model(**batch).loss ---


def loss_of_the_model(settings: dict[str, Any]) -> Outcome:
    from transformers import GPT2Config, GPT2LMHeadModel

    draw = np.random.default_rng(8)
    samples = []
    for number in range(18):
        ids = torch.from_numpy(draw.integers(1, 20, 8))
        mask = (torch.arange(8) < (8 if number < 2 else int(draw.integers(2, 9)))).long()
        samples.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        valid = (batch["labels"][:, 1:] != -100).sum()
        return {"loss": paceline.Mean(model(**batch).loss, weight=valid)}

    with _run(settings, global_batch_size=6, eval_batch_size=5) as run:
        config = GPT2Config(
            vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model: Any = GPT2LMHeadModel(config)
        model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        losses = [float(run.step(batch, lambda model, batch: model(**batch).loss)) for batch in run.batches(samples)]
        return _outcome(run, losses, run.evaluate(samples, measure))


SCRIPTS: tuple[Script, ...] = (
    tokenizer_and_collator,
    dataclasses_as_samples,
    iterable_with_workers,
    packed_sounds,
    contrastive,
    autoencoder,
    segmentation,
    weighted_sampler,
    automatic_micro_batch,
    loss_of_the_model,
)
