"""What calls of a loss function change is given back, wherever it is kept."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.kept.snapshot import KeptState

_numbers: dict[str, Any] = {"steps": []}


class _Loss:
    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.view = self.total[:1]
        self.mean: Tensor | None = None
        self.is_ready = False
        self.history: list[Any] = [deque([1, 2], maxlen=2), {"a": [0]}]
        self.matrix = np.zeros((2, 2))
        self.seen = {1}
        self.vocabulary = {f"word {number}": number for number in range(2000)}

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.total += 1
        self.mean = batch.mean()
        self.is_ready = True
        self.history[0].append(3)
        self.history[1]["a"].append(1)
        self.history[1]["b"] = 5
        self.history.append("new")
        self.matrix[0, 0] += 1
        self.seen.add(2)
        self.new_name = 1
        _numbers["steps"].append(1)
        _numbers["more"] = 1
        loss: Tensor = model(batch).sum()
        return loss


class _Model(nn.Linear):
    last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.last = inputs
        self.calls = 1
        return super().forward(inputs)


def test_everything_is_as_before() -> None:
    loss_fn, model = _Loss(), _Model(2, 2)
    kept = KeptState(loss_fn, [model])
    with kept.unchanged() as before:
        assert before.made() == []
        loss_fn(model, torch.ones(3, 2))
        assert {"mean", "is_ready", "new_name", "more", "last", "calls"} <= set(before.made())
    assert before.made() == []
    assert loss_fn.total.tolist() == [0, 0] and loss_fn.view.tolist() == [0]
    assert loss_fn.mean is None and loss_fn.is_ready is False
    assert loss_fn.history == [deque([1, 2]), {"a": [0]}]
    assert not loss_fn.matrix.any() and loss_fn.seen == {1}
    assert not hasattr(loss_fn, "new_name") and not hasattr(model, "calls") and model.last is None
    assert _numbers == {"steps": []}


def test_a_step_looks_at_small_values_that_calls_change() -> None:
    large = torch.zeros(2**19)
    counts = torch.zeros(1)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        large.add_(1)
        counts.add_(1)
        loss: Tensor = model(batch).sum()
        return loss

    kept, model = KeptState(loss_fn, []), nn.Linear(2, 2)
    with kept.unchanged():
        loss_fn(model, torch.ones(1, 2))
    assert not large.any() and not counts.any()
    before = kept.snapshot_of_changing()
    loss_fn(model, torch.ones(1, 2))
    before.restore()
    assert large.all() and not counts.any()


def test_a_variable_that_was_not_assigned_is_so_again() -> None:
    late: Tensor

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal late
        late = model(batch).sum()
        return late

    with KeptState(loss_fn, []).unchanged():
        loss_fn(nn.Identity(), torch.ones(2))
        assert late == 2
    with pytest.raises(NameError):
        _ = late


def test_numbers_that_counters_move_are_left_to_them() -> None:
    """Also in a dictionary whose other entries change: given back, a counter would seem to stand still in one pass."""
    counts: dict[str, Any] = {"calls": 0, "first": None}

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        counts["calls"] += 1
        counts["first"] = counts["first"] or counts["calls"]
        counts["last"] = counts["calls"]
        loss: Tensor = model(batch).sum()
        return loss

    with KeptState(loss_fn, []).unchanged() as before:
        loss_fn(nn.Linear(2, 2), torch.ones(3, 2))
        assert sorted(before.made()) == ["first", "last"]
    assert counts == {"calls": 1, "first": None}
