"""The properties of the law, each as a small task that shows it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tests.kit import losses, models
from tests.kit.oracle import Task

_sgd = functools.partial(torch.optim.SGD, lr=0.3)
_sgd_with_momentum = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)
_adamw = functools.partial(torch.optim.AdamW, lr=0.02)


def rows(num_samples: int, width: int = models.WIDTH) -> TensorDataset:
    draw = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, width, generator=draw)
    return TensorDataset(inputs, torch.randint(0, models.NUM_CLASSES, (num_samples,), generator=draw))


def sequences(num_samples: int) -> TensorDataset:
    """Rows of three, with a class for each that may be padding; of two out of three samples, all are."""
    draw = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 3, models.WIDTH, generator=draw)
    targets = torch.randint(0, models.NUM_CLASSES, (num_samples, 3), generator=draw)
    targets[torch.rand(num_samples, 3, generator=draw) < 0.3] = losses.IGNORED
    targets[torch.arange(num_samples) % 3 > 0] = losses.IGNORED
    return TensorDataset(inputs, targets)


def texts(num_samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(num_samples)
    tokens = torch.randint(0, models.NUM_TOKENS, (num_samples, 4), generator=draw)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def with_one_poisoned(data: TensorDataset) -> TensorDataset:
    inputs, targets = data.tensors
    return TensorDataset(inputs, targets.index_fill(0, torch.tensor([len(targets) // 2]), -1))


class RandomRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with a random transform, by torch's global generator."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, target = rows(18)[number]
        return inputs + 0.1 * torch.randn(models.WIDTH), target


WHOLE_BATCH = {
    "plain torch": Task(models.layers, losses.classes, rows(24), _sgd),
    "ragged end": Task(models.layers, losses.classes, rows(17), _sgd),
    "token mean": Task(models.layers, losses.counted_tokens, sequences(24), _sgd),
    "clipping and schedule": Task(
        models.layers,
        losses.classes,
        rows(20),
        _sgd_with_momentum,
        clip_norm=0.2,
        warmup_epochs=1.0,
        is_cosine=True,
        epochs=3,
    ),
    "frozen, unused and tied": Task(models.tied, losses.counted_tokens, texts(20), _sgd),
    "non-finite": Task(models.layers, losses.poisoned, with_one_poisoned(rows(24)), _sgd),
    "evaluation": Task(models.layers, losses.classes, rows(8), _sgd, losses.hits, losses.METRICS, rows(13), epochs=1),
    "order": Task(models.layers, losses.classes, rows(24), _sgd),
}
"""What equals the loop that everyone writes, in which a global batch goes through the model at once."""

BY_SHARD = {
    "random numbers": Task(models.layers_with_dropout, losses.with_noise, RandomRows(), _sgd),
    "batch norm": Task(models.layers_with_norm, losses.classes, rows(25), _sgd, global_batch_size=12),
    "coupled samples": Task(models.layers, losses.contrast, rows(20), _sgd),
    "checkpoint": Task(models.layers_with_dropout, losses.classes, rows(20), _adamw),
    "checkpoint, without momentum": Task(models.layers_with_dropout, losses.classes, rows(20), _sgd),
    "bits": Task(models.layers_with_norm_and_dropout, losses.classes, RandomRows(), _adamw, clip_norm=0.5),
}
"""What follows from how a global batch is cut into virtual shards."""

TASKS = WHOLE_BATCH | BY_SHARD
