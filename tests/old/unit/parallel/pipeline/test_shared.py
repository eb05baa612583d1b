"""Gradients of parameters that several stages have come together in the first of them, one micro-batch at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.pipeline.calls import ModelCall
from paceline.parallel.pipeline.recorder import record
from paceline.parallel.pipeline.shared import SharedParameters, holders_of
from paceline.parallel.pipeline.stage import Stage, stages_of


class Tied(nn.Module):
    """Multiplies by one matrix at its beginning, so many times, and at its end."""

    def __init__(self, num_first: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self._num_first = num_first

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._num_first):
            x = self.first(x)
        return F.linear(self.last(self.middle(x)), self.first.weight)


def cut(model: nn.Module) -> tuple[SharedParameters, list[Stage]]:
    recording = record(model, ModelCall((torch.zeros(2, 3),)))
    starts = recording.starts(["middle", "last"], 3)
    stages = stages_of(recording, starts)
    return SharedParameters(recording, starts, holders_of(stages)), stages


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_gradients_are_handed_on_from_the_last_stage_to_the_first() -> None:
    shared, stages = cut(Tied())
    assert [shared.are_in(number) for number in range(3)] == [True, False, True]
    weight = stages[0].get_parameter("first.weight")
    assert weight is stages[2].get_parameter("first.weight")
    weight.grad = later = torch.full((3, 3), 1e-8)
    (sent,) = shared.add(2, stages[2], [])
    assert torch.equal(sent, later)
    (passed_on,) = shared.add(1, stages[1], [sent])
    assert passed_on is sent
    weight.grad = torch.ones(3, 3)
    assert shared.add(0, stages[0], [passed_on]) == []
    assert torch.equal(gradient_of(weight), torch.full((3, 3), 1e-8) + torch.ones(3, 3))


def test_what_the_first_stage_did_not_use_has_the_gradient_of_the_others() -> None:
    shared, stages = cut(Tied())
    weight = stages[0].get_parameter("first.weight")
    shared.add(0, stages[0], [torch.ones(3, 3)])
    assert torch.equal(gradient_of(weight), torch.ones(3, 3))


def test_a_last_stage_without_a_gradient_is_refused() -> None:
    shared, stages = cut(Tied())
    with pytest.raises(ModelError, match=r"The loss does not depend on 'first\.weight' in the last of the stages"):
        shared.add(2, stages[2], [])


def test_a_stage_that_uses_one_several_times_is_refused() -> None:
    """The whole model adds the gradient of the later use to that of the last, then that of the first."""
    with pytest.raises(ModelError, match=r"The stage before 'middle' uses 'first\.weight' more than once"):
        cut(Tied(num_first=2))
