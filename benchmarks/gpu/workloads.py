"""What is trained on the page: models with samples of random values, and a plain loop that does the same."""

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
    """A model, and a batch of the samples it is trained on."""

    model: str
    batch: int
    sample: tuple[int, ...]
    """(channels, height, width) of an image; of a text its length."""
    options: dict[str, Any] = field(default_factory=dict)
    classes: int = 10
    """Or the size of the vocabulary."""
    precision: str = "float32"
    optimizer: str = "sgd"

    @property
    def job(self) -> dict[str, Any]:
        """The keys of a job that a plain loop has to do the same with."""
        is_colour = len(self.sample) == 3 and self.sample[0] == 3
        return {"global_batch_size": self.batch, "precision": self.precision, "channels_last": is_colour}

    def build(self) -> nn.Module:
        if len(self.sample) == 1:
            return models.build(self.model, vocab_size=self.classes, context=self.sample[0], **self.options)
        facts = {"num_classes": self.classes, "in_channels": self.sample[0], "image_size": self.sample[-1]}
        return nn.Sequential(Pixels(), models.build(self.model, **facts | self.options))

    def samples(self, num_batches: int) -> TensorDataset:
        draw, number = torch.Generator().manual_seed(0), num_batches * self.batch
        if len(self.sample) == 1:
            tokens = torch.randint(self.classes, (number, self.sample[0] + 1), generator=draw)
            return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        pixels = torch.randint(256, (number, *self.sample), generator=draw, dtype=torch.uint8)
        return TensorDataset(pixels, torch.randint(self.classes, (number,), generator=draw))

    def build_optimizer(self, model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4, fused=True)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)


class Pixels(nn.Module):
    """Images of bytes as numbers around 0."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().div(128).sub(1)


_GPT2 = {"num_layers": 12, "num_heads": 12, "width": 768}
_SMALL_GPT = {"num_layers": 2, "num_heads": 2, "width": 32}
FULL = {
    "GPT-2 small": Workload("gpt", 8, (1024,), _GPT2, 50304, "bfloat16", "adamw"),
    "ResNet-18 CIFAR": Workload("resnet18", 256, (3, 32, 32), {"stem": "cifar"}),
    "ResNet-50": Workload("resnet50", 64, (3, 224, 224), classes=1000),
    "LeNet": Workload("lenet", 256, (1, 28, 28)),
    "EfficientNet-B7": Workload("efficientnet-b7", 256, (3, 32, 32)),
}
TINY = {
    "GPT of 2 layers": Workload("gpt", 8, (16,), _SMALL_GPT, 64, "bfloat16", "adamw"),
    "ResNet-20": Workload("resnet20", 8, (3, 8, 8)),
    "small LeNet": Workload("lenet", 8, (1, 28, 28)),
}
ALL = FULL | TINY


def job_model(workload: str) -> nn.Module:
    """`model` of a job file."""
    return ALL[workload].build()


def job_data(split: str, workload: str) -> TensorDataset:
    """`data` of a job file."""
    return ALL[workload].samples(8 if split == "train" else 1)


def loss_fn(model: nn.Module, samples: Any) -> Tensor:
    inputs, targets = samples
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def plain_loop(
    workload: Workload, samples: TensorDataset, device: torch.device, *, compiled: bool
) -> Callable[[], Any]:
    """A step of a loop without Paceline: the same model, samples in a shuffled order, precision and optimizer."""
    model = workload.build().to(device)
    if workload.job["channels_last"]:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = workload.build_optimizer(model)
    called: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    order = iter(torch.randperm(len(samples)).split(workload.batch))

    def step() -> Tensor:
        rows = next(order)
        batch = [column.index_select(0, rows) for column in samples.tensors]
        if device.type == "cuda":
            batch = [column.pin_memory().to(device, non_blocking=True) for column in batch]
        optimizer.zero_grad()
        is_mixed = workload.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16) if is_mixed else contextlib.nullcontext():
            loss = loss_fn(called, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
