"""Short training runs for the rank tests: a job over a small data set, on whatever workers run this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline import models
from paceline.data import ArraySet, Augmentation
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from paceline.train.optimizers.optim import build_optimizer

_ALGORITHM: dict[str, Any] = {"numeric": "all_reduce", "bitwise": "tree_exact"}


@dataclass(frozen=True)
class Outcome:
    """What must not depend on the number of workers."""

    sha: str
    weights: dict[str, np.ndarray[Any, Any]]
    losses: list[float]
    metrics: dict[str, float]
    precision: str = "float32"


def images(num_samples: int, shape: tuple[int, int, int] = (3, 8, 8), augment: bool = True) -> ArraySet:
    draw = np.random.default_rng(num_samples)
    return ArraySet(
        draw.integers(0, 256, (num_samples, *shape), dtype=np.uint8),
        draw.integers(0, 10, num_samples),
        10,
        (0.5,) * shape[0],
        (0.25,) * shape[0],
        Augmentation(crop_padding=2, flip=True, cutout_size=3) if augment else None,
    )


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    inputs, targets = batch
    logits = model(inputs)
    return {
        "accuracy": (logits.argmax(1) == targets).double(),
        "loss": F.cross_entropy(logits, targets, reduction="none"),
    }


def train(
    job: Job,
    train_set: Any,
    test_set: Any = None,
    max_steps: int | None = None,
    checkpoint_dir: Path | None = None,
    **plan: Any,
) -> Outcome:
    """Train `job` as a user's script would."""
    facts = worker_facts()
    spread = Plan(**{"world_size": facts.world_size, "algorithm": _ALGORITHM[job.parity], "timeout_s": 60} | plan)
    with paceline.init(job, plan=spread, max_steps=max_steps, checkpoint_dir=checkpoint_dir) as run:
        shape = train_set[0][0].shape
        model = models.build(job.model, num_classes=10, in_channels=shape[0], image_size=shape[-1])
        example = None
        if run.mesh.pp > 1:
            example = next(iter(run.reader.read(train_set, 0, [np.arange(2)], train=False)))[0]
        model, _optimizer = run.prepare(model, build_optimizer(job.optim, model), example=example)
        losses = [float(run.step(batch, loss_fn)) for batch in run.batches(train_set)]
        metrics = run.evaluate(test_set, measure) if test_set is not None else {}
        weights = {name: tensor.detach().cpu().numpy().copy() for name, tensor in run.whole_state().items()}
        return Outcome(run.weights_sha256(), weights, losses, metrics, run.job.precision)


def largest_difference(mine: Outcome, theirs: Outcome) -> float:
    """The largest relative distance of any tensor."""
    worst = 0.0
    for name, value in mine.weights.items():
        scale = max(float(np.abs(value).max()), 1e-30)
        worst = max(worst, float(np.abs(value - theirs.weights[name]).max()) / scale)
    return worst
