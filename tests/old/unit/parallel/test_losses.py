"""What a loss function returns: read, added up, and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.losses import (
    LossLayout,
    LossLayouts,
    Mean,
    ShardLoss,
    StepLoss,
    ignore_unless,
    read_loss,
    watching_outputs,
)

LIKE = torch.zeros((), dtype=torch.float64)


def loss(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def read(returned: Any, num_samples: int = 2, num_in_batch: int = 8) -> ShardLoss:
    return read_loss(returned, num_samples / num_in_batch, num_in_batch, LIKE)


def test_a_plain_loss_is_weighted_by_samples() -> None:
    one = read(loss(3.0))
    assert one.layout == LossLayout()
    assert one.weight == 0.25
    assert one.sums.tolist() == [0.75]
    step = StepLoss.of(torch.tensor([1.5]), one.layout)
    assert step.rescale is None
    assert float(step.loss) == 1.5


def test_means_are_weighted_by_their_own_weight() -> None:
    shards = [
        read((Mean(loss(3.0), 5), {"b": Mean(1.0, 2), "a": 7.0})),
        read((Mean(loss(float("nan")), torch.tensor(0)), {"a": torch.tensor(1.0), "b": Mean(float("nan"), 0.0)})),
        read((Mean(loss(1.0), torch.tensor([15])), {"a": 1, "b": Mean(torch.tensor(4.0), 1)}), num_samples=4),
    ]
    layout = shards[0].layout
    assert layout == LossLayout(True, (("a", False), ("b", True)))
    assert all(one.layout == layout for one in shards)
    assert layout.length == 5
    sums = torch.stack([one.sums for one in shards]).sum(0)
    step = StepLoss.of(sums, layout)
    assert float(step.loss) == pytest.approx((3 * 5 + 1 * 15) / 20)
    assert {name: float(value) for name, value in step.values.items()} == pytest.approx({"a": 2.5, "b": 2.0})
    assert step.rescale is not None
    assert float(step.rescale) == pytest.approx(8 / 20)


def test_a_batch_in_which_nothing_counts_has_no_loss() -> None:
    one = read(Mean(loss(float("nan")), 0))
    assert torch.isnan(StepLoss.of(one.sums, one.layout).loss)


def test_nothing_flows_back_from_what_counts_for_nothing() -> None:
    model = nn.Linear(2, 2)
    for is_counted in (torch.tensor(False), False):
        with watching_outputs(model) as outputs:
            output = model(torch.ones(1, 2))
        mean = (output * 0.0).sum() / torch.tensor(0.0)
        ignore_unless(is_counted, outputs)
        (mean * 0.0).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.eq(0).all()


def test_a_function_returns_the_same_numbers_all_the_time() -> None:
    functions = LossLayouts(None)
    assert functions.may_be_weighted("f")
    functions.has_returned("f", LossLayout())
    functions.has_returned("g", LossLayout(True))
    assert not functions.may_be_weighted("f")
    assert functions.may_be_weighted("g")
    assert functions.of("g") == LossLayout(True)
    with pytest.raises(ModelError, match=r"a plain loss and no further values for some samples, and a paceline\.Mean"):
        functions.has_returned("f", LossLayout(True, (("x", True),)))
