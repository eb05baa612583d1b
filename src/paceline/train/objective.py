"""The loss and metrics of the reference recipes: cross-entropy of classes or of next tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.spec import OptimSpec

METRICS = ("accuracy", "loss")
"""The names of the metrics that `accuracy_and_loss` measures."""


def training_loss(optim: OptimSpec) -> Callable[[nn.Module, Any], Tensor]:
    """Mean cross-entropy over samples; over their tokens too for logits of shape (batch, tokens, classes)."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits, targets = _logits(model, batch)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=optim.label_smoothing)

    return loss


def accuracy_and_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Accuracy and cross-entropy of every sample, each the mean over the sample's tokens if it has several."""
    logits, targets = _logits(model, batch)
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    correct = (logits.argmax(-1) == targets).to(torch.float64)
    return {"accuracy": correct.view(len(correct), -1).mean(1), "loss": losses.view(len(losses), -1).mean(1)}


def _logits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = batch
    except (TypeError, ValueError):
        raise ModelError(
            "paceline train needs a data set whose samples are pairs (input, target); for others write a script with "
            "paceline.init and your own loss."
        ) from None
    logits = model(inputs)
    return (logits if logits.dtype == torch.float64 else logits.float()), targets
