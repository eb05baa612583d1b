"""What is trained on the page: models, samples of random values, and a plain training loop beside Paceline's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import models


@dataclass(frozen=True)
class Workload:
    """A model and the shape of its samples."""

    model: str
    batch: int
    sample: tuple[int, ...]
    """(channels, height, width) of an image; of a text its length."""
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "float32"
    classes: int = 10
    """Or tokens of the vocabulary."""
    optimizer: str = "sgd"

    def build(self) -> nn.Module:
        if len(self.sample) == 1:
            return models.build(self.model, **self.options)
        facts = {"num_classes": self.classes, "in_channels": self.sample[0], "image_size": self.sample[-1]}
        return nn.Sequential(Pixels(), models.build(self.model, **facts | self.options))

    def samples(self, num_samples: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(0)
        if len(self.sample) == 1:
            tokens = torch.randint(self.classes, (num_samples, self.sample[0] + 1), generator=draw)
            return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        pixels = torch.randint(256, (num_samples, *self.sample), generator=draw, dtype=torch.uint8)
        return TensorDataset(pixels, torch.randint(self.classes, (num_samples,), generator=draw))

    def build_optimizer(self, model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4, fused=True)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)

    @property
    def job(self) -> dict[str, Any]:
        """The keys of a job that a plain loop must do the same with."""
        return {
            "global_batch_size": self.batch,
            "precision": self.precision,
            "channels_last": len(self.sample) == 3 and self.sample[0] == 3,
        }


class Pixels(nn.Module):
    """Images of bytes as numbers around 0."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().div(128).sub(1)


_GPT2 = {"vocab_size": 50304, "context": 1024, "num_layers": 12, "num_heads": 12, "width": 768}
_SMALL_GPT = {"vocab_size": 64, "context": 16, "num_layers": 2, "num_heads": 2, "width": 32}
FULL = {
    "GPT-2 small, bf16, 8 x 1,024": Workload("gpt", 8, (1024,), _GPT2, "bfloat16", 50304, "adamw"),
    "ResNet-18, CIFAR, 256": Workload("resnet18", 256, (3, 32, 32), {"stem": "cifar"}),
    "ResNet-50, 224 x 224, 64": Workload("resnet50", 64, (3, 224, 224), classes=1000),
    "LeNet, 256": Workload("lenet", 256, (1, 28, 28)),
    "EfficientNet-B7, 32 x 32, 256": Workload("efficientnet-b7", 256, (3, 32, 32)),
}
TINY = {
    "GPT, 2 layers, bf16, 8 x 16": Workload("gpt", 8, (16,), _SMALL_GPT, "bfloat16", 64, "adamw"),
    "ResNet-20, 16": Workload("resnet20", 16, (3, 32, 32)),
    "LeNet, 32": Workload("lenet", 32, (1, 28, 28)),
}


def workloads(device: str) -> dict[str, Workload]:
    return FULL if device == "cuda" else TINY


def job_model(workload: str) -> nn.Module:
    """`model` of a job file."""
    return (FULL | TINY)[workload].build()


def job_data(split: str, workload: str) -> TensorDataset:
    """`data` of a job file."""
    chosen = (FULL | TINY)[workload]
    return chosen.samples(chosen.batch * (8 if split == "train" else 1))


def loss_fn(model: nn.Module, samples: Any) -> Tensor:
    inputs, targets = samples
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def plain_loop(workload: Workload, samples: TensorDataset, device: torch.device, *, compiled: bool) -> Callable[[], Any]:
    """One step of a loop that knows nothing of Paceline, with the same model, batch, precision and optimizer."""
    model = workload.build().to(device)
    layout = torch.channels_last if workload.job["channels_last"] else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = workload.build_optimizer(model)
    called = torch.compile(model) if compiled else model
    is_mixed = workload.precision == "bfloat16"
    order = torch.randperm(len(samples)).split(workload.batch)
    number = 0

    def step() -> Tensor:
        nonlocal number
        columns = [tensor.index_select(0, order[number % len(order)]) for tensor in samples.tensors]
        number += 1
        if device.type == "cuda":
            columns = [column.pin_memory().to(device, non_blocking=True) for column in columns]
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if is_mixed else contextlib.nullcontext():
            loss = loss_fn(called, columns)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
