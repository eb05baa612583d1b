"""Loss functions and metrics that know only PyTorch; see `oracle.Loss` and `oracle.Measure`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


def classes(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def counted_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The mean over the tokens that are not padding; of no tokens it is NaN, with the weight 0."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


def with_noise(model: nn.Module, batch: Any) -> Tensor:
    """With draws from each of the global generators."""
    inputs, targets = batch
    noisy = inputs + 0.3 * torch.randn_like(inputs) + random.gauss(0, 0.1) + np.random.normal(0, 0.1)
    return F.cross_entropy(model(noisy), targets)


def contrast(model: nn.Module, batch: Any) -> Tensor:
    """Every sample against the others of its virtual shard."""
    inputs, _ = batch
    features = F.normalize(model(inputs), dim=1)
    return (features @ features.T).logsumexp(1).mean()


def poisoned(model: nn.Module, batch: Any) -> Tensor:
    """NaN where the class of a sample is negative."""
    inputs, targets = batch
    losses = F.cross_entropy(model(inputs), targets.clamp(min=0), reduction="none")
    return (losses * torch.where(targets < 0, float("nan"), 1.0)).mean()


def hits(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Means over samples, a mean by weight, and what `METRICS` take."""
    inputs, targets = batch
    logits = model(inputs)
    losses = F.cross_entropy(logits, targets, reduction="none")
    weights = 1.0 + targets
    return {
        "accuracy": (logits.argmax(1) == targets).double(),
        "loss": losses,
        "weighted": ((losses * weights).sum() / weights.sum(), weights.sum()),
        "largest": (losses,),
    }


def _largest(losses: Tensor) -> float:
    return float(losses.max())


METRICS = {"largest": (_largest, max, float)}
"""Metrics that are no means: (update, merge, compute)."""
