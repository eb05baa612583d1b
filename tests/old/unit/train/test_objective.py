"""Loss and metrics of the recipes, against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.spec import OptimSpec
from paceline.train.evaluation.objective import accuracy_and_loss, training_loss

IDENTITY = nn.Identity()


def drawn(*shape: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(*shape, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, classes, shape, generator=generator)


def surprise(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log p of the target, mixed with the mean over all classes: one value a target."""
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    own = -log_p.gather(-1, targets[..., None])[..., 0]
    return (1 - smoothing) * own - smoothing * log_p.mean(-1)


@pytest.mark.parametrize("shape", [(6,), (6, 3)], ids=["classes", "tokens"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_training_loss_is_the_mean_over_samples_and_tokens(shape: tuple[int, ...], smoothing: float) -> None:
    logits, targets = drawn(*shape)
    loss = training_loss(OptimSpec(label_smoothing=smoothing))(IDENTITY, (logits, targets))
    torch.testing.assert_close(loss, surprise(logits, targets, smoothing).mean())


@pytest.mark.parametrize("shape", [(6,), (6, 3)], ids=["classes", "tokens"])
def test_metrics_have_one_value_a_sample(shape: tuple[int, ...]) -> None:
    logits, targets = drawn(*shape)
    values = accuracy_and_loss(IDENTITY, (logits, targets))
    assert set(values) == {"accuracy", "loss"}
    assert all(value.shape == (6,) for value in values.values())
    hits = (logits.argmax(-1) == targets).double()
    torch.testing.assert_close(values["accuracy"], hits.view(6, -1).mean(1))
    # No label smoothing here: the loss of a test is that of its labels.
    torch.testing.assert_close(values["loss"], surprise(logits, targets).view(6, -1).mean(1))


def test_half_precision_is_left_before_the_logarithm() -> None:
    logits, targets = drawn(6)
    half = logits.to(torch.bfloat16)
    loss = training_loss(OptimSpec())(IDENTITY, (half, targets))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), surprise(half.double(), targets).mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [torch.zeros(3, 2, 2), (torch.zeros(3),), None, {"a": 1, "b": 2, "c": 3}])
def test_batches_that_are_no_pairs_are_one_sentence(batch: Any) -> None:
    with pytest.raises(ModelError, match=r"pairs \(input, target\)"):
        accuracy_and_loss(IDENTITY, batch)
