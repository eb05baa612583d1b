"""Small models and how they are trained in `parity = "bitwise"`, by any strategy: what must not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.spec import Job, ModelSpec, PipelineSpec, Plan, parse_mesh
from paceline.spec.mesh import ScheduleName
from paceline.train.optimizers.optim import build_optimizer

STEPS, HALF = 4, 2
"""Two epochs of 21 samples in batches of 12: the second is ragged, and has a shard that is smaller than others."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: ModelSpec
    shape: tuple[int, ...]
    """Of a sample; of one number: tokens."""
    optimizer: str = "sgd"
    cuts: tuple[str, ...] = ()
    """Where four stages begin."""

    @property
    def facts(self) -> dict[str, int]:
        """What the model is told of the data."""
        if self.is_text:
            return {}
        channels, size, _ = self.shape
        known = {"in_channels": channels, "image_size": size, "in_features": channels * size * size}
        return {"num_classes": 10, **known}

    @property
    def is_text(self) -> bool:
        return len(self.shape) == 1


def unaligned_mlp(num_classes: int, in_features: int) -> nn.Module:
    """With parameters that do not begin where torch's own do, as those of a file may."""
    model = models.build(ModelSpec("mlp", {"dropout": 0.0}), num_classes=num_classes, in_features=in_features)
    for parameter in model.parameters():
        place = torch.empty(parameter.numel() + 1)[1:].view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
    return model


class Forks(nn.Module):
    """Every layer reads what the first one made, and what crosses a cut before it are views with gaps, repeated values
    and turned ones, from (b, 3, 5, 5), which is 15 tokens of 5 numbers: sums of many gradients in many layouts."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.side = nn.Linear(5, 22), nn.Linear(5, 22)
        self.layers = nn.ModuleList(nn.Linear(22, 22) for _ in range(4))
        self.halves = nn.ModuleList(nn.Linear(11, 22) for _ in range(4))
        self.head = nn.Linear(22, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(1).unflatten(1, (15, 5))
        first = y = self.stem(tokens).tanh()
        side = self.side(tokens)
        for layer, half in zip(self.layers, self.halves, strict=True):
            _, right = y.chunk(2, -1)
            mean, turned = y.mean(-1, keepdim=True).expand(y.shape), y.transpose(1, 2)
            y = layer(y * first) + first * half(right) + mean * first + turned.sum(1).unsqueeze(-1)
        turned = side.transpose(1, 2).contiguous() * y.transpose(1, 2).tanh()  # so the gradient of `side` is turned
        logits: Tensor = self.head(turned.mean(2))
        return logits


def forks(num_classes: int) -> nn.Module:
    return Forks(num_classes)


_GPT = {"vocab_size": 31, "context": 6, "num_layers": 2, "num_heads": 2, "width": 12, "dropout": 0.1}
CASES = {
    "lenet": Case(ModelSpec("lenet"), (1, 16, 16)),
    "lenet-adamw": Case(ModelSpec("lenet"), (1, 16, 16), "adamw"),
    "resnet20": Case(ModelSpec("resnet20"), (3, 8, 8)),
    "dropout": Case(ModelSpec("mlp", {"dropout": 0.5}), (3, 5, 5), "adamw"),
    "unaligned": Case(ModelSpec(f"{__name__}:unaligned_mlp"), (3, 5, 5)),
    "gpt": Case(ModelSpec("gpt", _GPT), (6,), "adamw"),
    "forks": Case(ModelSpec(f"{__name__}:forks"), (3, 5, 5), cuts=("layers.1", "layers.2", "layers.3")),
}


def can_be_cut(name: str, strategy: str) -> bool:
    """Whether a strategy has no pipeline, or one of as many stages as the case names."""
    return not CASES[name].cuts or "pp" not in strategy or "pp4" in strategy or strategy.endswith(" of 2")


@dataclass(frozen=True)
class Outcome:
    """What must not depend on how a run is spread."""

    sha: str
    losses: tuple[float, ...]
    metrics: Mapping[str, float]


def _data(case: Case) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    if case.is_text:
        tokens = torch.randint(0, 31, (21, *case.shape), generator=draw)
        return TensorDataset(tokens, tokens.roll(1, 1))
    return TensorDataset(torch.randn(21, *case.shape, generator=draw), torch.randint(0, 10, (21,), generator=draw))


def _losses(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    losses = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(inputs), -1).mean(1)


def train(case: Case, strategy: str, folder: Path | None = None, stop: int = STEPS) -> Outcome:
    """
    Args:
        strategy: a mesh, and of a pipeline its schedule and how many stages a worker has: "pp2, interleaved of 2".
    """
    torch.set_num_threads(1)
    facts = worker_facts()
    job = Job().with_values(
        parity="bitwise",
        global_batch_size=12,
        virtual_shards=6,
        epochs=2,
        optim={"name": case.optimizer, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5},
        checkpoint={"every_epoch": False},
    )
    mesh, _, pipeline = strategy.partition(", ")
    schedule, _, stages_per_worker = pipeline.partition(" of ")
    plan = Plan(
        world_size=facts.world_size,
        algorithm="tree_exact",
        timeout_s=60,
        mesh=parse_mesh(mesh, facts.world_size) if facts.world_size > 1 else None,
        pipeline=PipelineSpec(cast(ScheduleName, schedule or "1f1b"), int(stages_per_worker or 1), cuts=case.cuts),
    )
    with paceline.init(job, plan=plan, max_steps=stop, checkpoint_dir=folder) as run:
        run.say = lambda _sentence: None
        torch.manual_seed(0)
        model = models.build(case.model, **case.facts)
        data = _data(case)
        run.prepare(model, build_optimizer(job.optim, model), example=data[:2][0])
        losses = tuple(float(run.step(batch, lambda *given: _losses(*given).mean())) for batch in run.batches(data))
        metrics = run.evaluate(data, lambda *given: {"loss": _losses(*given)})
        return Outcome(run.weights_sha256(), losses, metrics)
